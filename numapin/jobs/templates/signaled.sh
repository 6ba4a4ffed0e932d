signaled=0
trap 'signaled=1; kill -USR1 $! || :' USR1
trap 'kill $! || :' TERM
