"""`numapin exec`: bind one rank that something else started.

Comes in: the environment that srun, mpirun or another launcher made. Goes out: the command, bound.

::

    identify.py  PURE  which rank of its host this process is
    launcher.py  EDGE  what started this task, and which CPUs it has
    plan.py      PURE  a plan made for one task
    slice.py     PURE  one task's part of a plan that was made before
    enter.py     EDGE  bind this process and become the command
"""
