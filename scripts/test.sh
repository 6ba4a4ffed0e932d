#!/bin/sh
# Run tests; name the slowest; up to three that fail run once more, alone: test.sh PYTHON PYTEST-OPTION…
# The tests in virtual machines count as one, because they share a boot. Tests that pass alone do not fail the run; they
# are named, and appended to .cache/unsteady, which CI prints at its end.
set -u
python=$1
shift
record=.pytest_cache/v/cache/lastfailed # JSON with one test a line

"$python" -m pytest -rfEs --durations=30 --cache-clear "$@"
status=$?
[ $status = 1 ] && [ "$(grep :: $record | sed 's:"tests/vm/.*:vm:' | sort -u | wc -l)" -le 3 ] || exit $status
failed=$(sed -n 's/^  "\(.*::.*\)": true,*$/failed beside the others, passed alone: \1/p' $record)
echo "once more, alone: $(echo "$failed" | wc -l) that failed"
"$python" -m pytest -rfEs --last-failed "$@" --numprocesses=0 || exit 1
mkdir -p .cache
echo "$failed" | tee -a .cache/unsteady
