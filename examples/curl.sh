#!/usr/bin/env bash
# One answer over HTTP and JSON. Usage: examples/curl.sh ["question"]
set -euo pipefail

# The address of the mesh that `make up` started here; SLUICE_ENDPOINT names another.
running=$(python3 -c 'import json; print(json.load(open(".sluice/run/envoy.json"))["ports"]["http"])' 2>/dev/null || true)
address=${SLUICE_ENDPOINT:-${running:-localhost:8080}}
key=$(cat "${SLUICE_KEY_FILE:-.sluice/api-key}")
question=${1:-What is the capital of France?}

# The body is made by python, so that any question is valid JSON.
body=$(python3 -c 'import json, sys; print(json.dumps({"prompt": sys.argv[1], "sampling": {"max_tokens": 64}}))' "$question")
curl --fail-with-body --silent --show-error \
  -H "authorization: Bearer $key" -H "content-type: application/json" \
  -d "$body" "http://$address/chat"
echo
