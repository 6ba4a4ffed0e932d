"""`numapin job`: scripts that start bound ranks below a resource manager. Pure.

Comes in: a `JobRequest`. Goes out: the text of a script or manifest, a function an engine.

    request.py      what the user asked for, checked
    duration.py     times, as they are typed and as each engine takes them
    share.py        what a machine file says a job needs: CPUs, memory
    shell.py        quoting, and what every script does
    slurm.py  mpi.py  pbs.py  lsf.py
    kubernetes.py   an Indexed Job with its Service, or Kubeflow's PyTorchJob; yaml.py writes them
"""
