#!/usr/bin/env bash
# One answer over HTTP and JSON. Usage: examples/curl.sh ["question"]
set -euo pipefail

address=${SLUICE_ADDRESS:-localhost:8080}
key=$(cat "${SLUICE_KEY_FILE:-.sluice/api-key}")
question=${1:-What is the capital of France?}

# The body is made by python, so that any question is valid JSON.
body=$(python3 -c 'import json, sys; print(json.dumps({"prompt": sys.argv[1], "sampling": {"max_tokens": 64}}))' "$question")
curl --fail-with-body --silent --show-error \
  -H "authorization: Bearer $key" -H "content-type: application/json" \
  -d "$body" "http://$address/chat"
echo
