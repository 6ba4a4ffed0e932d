"""Job scripts that start bound ranks under a resource manager, for `numapin job`. Pure.

Comes in: a `JobRequest`. Goes out: the text of a script or manifest. Each engine has one function for it.

::

    request.py           PURE  the user's request, checked
    duration.py          PURE  times as users type them and as each engine takes them
    image.py             PURE  container images as each engine names them
    share.py             PURE  a job's share of a machine: GPUs, CPUs, memory
    scripts.py           PURE  sbatch, mpirun, qsub, bsub
    kubernetes.py        PURE  kubectl apply: checks, and the values of the templates
    pod_options.py       PURE  the user's additions to pods: variables, volumes, ...
    manifest.py          PURE  fill the templates in
"""
