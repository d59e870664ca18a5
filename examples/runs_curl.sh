#!/usr/bin/env bash
# Runs, a conversation and documents over HTTP and JSON. Usage: examples/runs_curl.sh
set -euo pipefail

# The address of the mesh that `make up` started here; SLUICE_ENDPOINT names another.
running=$(python3 -c 'import json; print(json.load(open(".sluice/run/envoy.json"))["ports"]["http"])' 2>/dev/null || true)
address=${SLUICE_ENDPOINT:-${running:-localhost:8080}}
key=$(cat "${SLUICE_KEY_FILE:-.sluice/api-key}")

call() { # arguments of curl
  curl --fail-with-body --silent --show-error --no-buffer \
    -H "authorization: Bearer $key" -H "content-type: application/json" "$@"
}
field() { # a value of the JSON on standard input, by its path
  python3 -c 'import functools, json, sys; print(functools.reduce(lambda value, name: value[name], sys.argv[1].split("."), json.load(sys.stdin)))' "$1"
}

echo "# A run, watched: one event a line; the last one is \"ended\"."
call -d '{"task":"What is 123 plus 45?","tools":["calculator"],"tool_choice":"TOOL_CHOICE_EACH"}' "http://$address/v1/runs"

echo "# A run in the background: read as it is, then watched from its second event on."
run=$(call -d '{"task":"What is 123 plus 45?","tools":["calculator"],"tool_choice":"TOOL_CHOICE_EACH","background":true}' "http://$address/v1/runs" | field event.run_id)
call "http://$address/v1/runs/$run"
echo
call "http://$address/v1/runs/$run/events?from_sequence=2"

echo "# A call that needs a person's word: the run waits at a step, and goes on when that is decided."
task='{"task":"Open a ticket: the lamp flickers.","tools":["desk"],"tool_choice":"TOOL_CHOICE_EACH"}'
while read -r line; do
  echo "$line"
  case $line in
    *'"waiting":{'*)
      run=$(field event.run_id <<<"$line")
      step=$(field event.waiting.step <<<"$line")
      sequence=$(field event.sequence <<<"$line")
      break
      ;;
  esac
done < <(call -d "$task" "http://$address/v1/runs" 2> >(grep -v "curl: (23)" >&2)) # (23): nobody reads on
call -d "{\"step\":$step,\"decision\":\"RESUME_DECISION_RETRY\"}" "http://$address/v1/runs/$run/resume"
echo
call "http://$address/v1/runs/$run/events?from_sequence=$((sequence + 1))"

echo "# A conversation that the mesh keeps: a session, and a turn in it."
session=$(call -d '{}' "http://$address/v1/sessions" | field session.session_id)
call -d "{\"task\":\"Good morning\",\"session_id\":\"$session\"}" "http://$address/v1/runs" | tail -n 1
call "http://$address/v1/sessions/$session"
echo
call -X DELETE "http://$address/v1/sessions/$session"
echo

echo "# A document: stored, made searchable by a run, found. \"content\" would be base64, \"text\" is as it is."
place="http://$address/v1/collections/kitchen/documents/kettle.txt"
run=$(call -X PUT -d '{"text":"A kettle boils water.","media_type":"text/plain"}' "$place" | field run_id)
call "http://$address/v1/runs/$run/events" | tail -n 1
call "$place"
echo
call -d '{"query":"What boils water?","top_k":1}' "http://$address/v1/collections/kitchen/search"
echo
call -X DELETE "$place"
echo
