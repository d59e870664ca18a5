#!/usr/bin/env bash
# Usage: install.sh NAME PIP_ARGUMENT...
#
# Runs `.venv/bin/pip install PIP_ARGUMENT...` (PIP names another pip), shows one line of progress instead of pip's hundreds, and keeps pip's
# own output in .venv/logs/NAME.log. Exits with 1 and the end of that log when pip fails.
set -euo pipefail

name=$1
shift
# pip's own last words would be a traceback in the log.
trap 'printf "\n  %s: interrupted; the next run goes on from here\n" "$name" >&2; exit 130' INT
venv=.venv
log=$venv/logs/$name.log
mkdir -p "$venv/logs"

# Two installs at a time would mix their files; the second one waits.
exec 9>"$venv/logs/.lock"
if command -v flock >/dev/null; then flock 9; fi

# How many packages to expect: the pinned lines of the locks among the arguments.
total=0
for argument in "$@"; do
  if [[ $argument == *.txt ]]; then
    total=$((total + $(grep -c '^[A-Za-z0-9].*==' "$argument")))
  fi
done

# A terminal gets one line that counts; a log file gets a line now and then.
if [[ -t 1 ]]; then live=1; else live=0; fi
show='
  # torch brings packages that its own line does not count.
  function count(n) { return n <= total ? n " of " total : n " packages" }
  function say(text) { if (live) printf "\r\033[K  %s: %s", name, text; else print "  " name ": " text; fflush() }
  /^Collecting |^Requirement already satisfied/ { if (live || ++seen % 40 == 0) say(count(live ? ++seen : seen)) }
  /^Installing collected/ { say("unpacking") }
  END { if (live) printf "\r\033[K" }
'

start=$SECONDS
if ! PYTHONUNBUFFERED=1 "${PIP:-$venv/bin/pip}" install --disable-pip-version-check --no-input --progress-bar off "$@" \
  2>&1 | tee "$log" | awk -v live="$live" -v name="$name" -v total="$total" "$show"; then
  echo "  $name: failed; the end of $log:" >&2
  grep -v '^WARNING: Location' "$log" | tail -n 15 >&2
  exit 1
fi
echo "  $name: ready after $((SECONDS - start)) s"
