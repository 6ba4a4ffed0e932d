"""`numapin exec`: bind one rank that another launcher started.

Comes in: the environment that srun, mpirun or another launcher made. Goes out: the command, bound.

::

    identify.py  PURE  which rank of its host this process is
    launcher.py  EDGE  the CPUs of the process that started this task
    plan.py      PURE  a plan for one task
    slice.py     PURE  one task's part of an existing plan
    repeated.py  PURE  a launcher that another launcher starts several times
    enter.py     EDGE  bind this process and become the command
"""
