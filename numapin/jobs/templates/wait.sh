status=0
wait "$run" || status=$?
while [ "$signals" -gt 0 ]; do # a signal interrupts wait, not the run
    signals=$((signals - 1)) status=0
    wait "$run" || status=$?
done
trap : USR1 TERM # the run has ended, and its pid may be reused
