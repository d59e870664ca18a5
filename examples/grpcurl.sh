#!/usr/bin/env bash
# A streamed answer with grpcurl, by reflection: no proto files needed.
# Usage: examples/grpcurl.sh ["question"]
set -euo pipefail

# The address of the mesh that `make up` started here; SLUICE_ENDPOINT names another.
running=$(python3 -c 'import json; print(json.load(open(".sluice/run/envoy.json"))["ports"]["http"])' 2>/dev/null || true)
address=${SLUICE_ENDPOINT:-${running:-localhost:8080}}
key=$(cat "${SLUICE_KEY_FILE:-.sluice/api-key}")
question=${1:-What is the capital of France?}
# `make up` installs one into the environment; any other will do.
grpcurl=$(command -v grpcurl || echo .venv/bin/grpcurl)

body=$(python3 -c 'import json, sys; print(json.dumps({"prompt": sys.argv[1], "sampling": {"max_tokens": 64}}))' "$question")
"$grpcurl" -plaintext -H "authorization: Bearer $key" -d "$body" \
  "$address" sluice.scheduler.v1.SchedulerService/Generate
