#!/usr/bin/env bash
# Runs, a conversation and documents with grpcurl, by reflection. Usage: examples/runs_grpcurl.sh
set -euo pipefail

# The address of the mesh that `make up` started here; SLUICE_ENDPOINT names another.
running=$(python3 -c 'import json; print(json.load(open(".sluice/run/envoy.json"))["ports"]["http"])' 2>/dev/null || true)
address=${SLUICE_ENDPOINT:-${running:-localhost:8080}}
key=$(cat "${SLUICE_KEY_FILE:-.sluice/api-key}")
# `make up` installs one into the environment; any other will do.
grpcurl=$(command -v grpcurl || echo .venv/bin/grpcurl)

call() { # method, message as JSON, further options
  "$grpcurl" -plaintext -H "authorization: Bearer $key" "${@:3}" -d "$2" \
    "$address" "sluice.scheduler.v1.SchedulerService/$1"
}
field() { # a value of the JSON on standard input, by its path
  python3 -c 'import functools, json, sys; print(functools.reduce(lambda value, name: value[name], sys.argv[1].split("."), json.load(sys.stdin)))' "$1"
}

echo "# A run, watched: one event after the other; the last one is \"ended\"."
call RunAgent '{"task":"What is 123 plus 45?","tools":["calculator"],"tool_choice":"TOOL_CHOICE_EACH"}'

echo "# A run in the background that needs a person's word: it waits at a step."
task='{"task":"Open a ticket: the lamp flickers.","tools":["desk"],"tool_choice":"TOOL_CHOICE_EACH","background":true}'
run=$(call RunAgent "$task" | field event.run_id)
until call GetRun "{\"run_id\":\"$run\"}" | grep -q RUN_STATE_WAITING; do sleep 0.2; done
# A watch goes on for as long as the run waits: this one ends by its deadline.
events=$(call WatchRun "{\"run_id\":\"$run\"}" -max-time 2 2>/dev/null || true)
step=$(grep -A 2 '"waiting"' <<<"$events" | sed -n 's/.*"step": \([0-9]*\).*/\1/p')

echo "# The decision, and what the run did after it."
call ResumeRun "{\"run_id\":\"$run\",\"step\":$step,\"decision\":\"RESUME_DECISION_RETRY\"}"
call WatchRun "{\"run_id\":\"$run\"}"

echo "# A conversation that the mesh keeps: a session, and a turn in it."
session=$(call CreateSession '{}' | field session.session_id)
call RunAgent "{\"task\":\"Good morning\",\"session_id\":\"$session\"}"
call GetSession "{\"session_id\":\"$session\"}"
call DeleteSession "{\"session_id\":\"$session\"}"

echo "# A document: stored, made searchable by a run, found."
place='"collection":"kitchen","document_id":"kettle.txt"'
run=$(call PutDocument "{$place,\"text\":\"A kettle boils water.\",\"media_type\":\"text/plain\"}" | field run_id)
call WatchRun "{\"run_id\":\"$run\"}"
call GetDocument "{$place}"
call SearchDocuments '{"collection":"kitchen","query":"What boils water?","top_k":1}'
call DeleteDocument "{$place}"
