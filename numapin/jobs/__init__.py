"""`numapin job`: scripts that start bound ranks below a resource manager. Pure.

Comes in: a `JobRequest`. Goes out: the text of a script or manifest, a function an engine.

::

    request.py     PURE  what the user asked for, checked
    duration.py    PURE  times, as they are typed and as each engine takes them
    image.py       PURE  container images, as each engine names them
    share.py       PURE  what a machine file says a job needs: CPUs, memory
    shell.py       PURE  quoting, and what every script does
    slurm.py       PURE  sbatch
    mpi.py         PURE  mpirun
    pbs.py         PURE  qsub
    lsf.py         PURE  bsub
    kubernetes.py  PURE  an Indexed Job with its Service, or Kubeflow's PyTorchJob
"""
