while kill -0 $! 2>/dev/null; do wait $! || :; done # a signal ends wait, but not the run
trap '' USR1 TERM
status=0
wait $! || status=$?
