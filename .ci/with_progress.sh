#!/usr/bin/env bash
# Run a long, quiet command and show that it is alive:  .ci/with_progress.sh "what it does" COMMAND...
# On a terminal one line counts the seconds; in a pipe a line comes every PROGRESS_EVERY_S seconds (10).
set -euo pipefail
what=$1
shift
every=${PROGRESS_EVERY_S:-10}
began=$SECONDS
if [ -t 2 ]; then
  show() { printf '\r%s ... %d s ' "$what" $((SECONDS - began)) >&2; }
  every=1
else
  show() { printf '%s ... %d s\n' "$what" $((SECONDS - began)) >&2; }
fi
printf '%s\n' "$what" >&2
"$@" &
command=$!
trap 'kill "$command" 2>/dev/null || true' INT TERM
# the sleep holds none of our streams: it outlives the ticker for a moment, and a reader of them must not wait for it
(while sleep "$every" </dev/null >/dev/null 2>&1; do show; done) &
ticker=$!
code=0
wait "$command" || code=$?
kill "$ticker" 2>/dev/null || true
wait "$ticker" 2>/dev/null || true
if [ -t 2 ]; then printf '\r' >&2; fi
if [ "$code" = 0 ]; then
  printf '%s: done in %d s\n' "$what" $((SECONDS - began)) >&2
else
  printf '%s: failed with exit code %d after %d s\n' "$what" "$code" $((SECONDS - began)) >&2
fi
exit "$code"
