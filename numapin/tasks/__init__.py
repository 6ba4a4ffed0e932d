"""`numapin exec`: bind one rank that another launcher started.

::

    identify.py  which rank of its host this process is
    launcher.py  the CPUs of the process that started this task
    plan.py      a plan for one task
    slice.py     one task's part of an existing plan
    repeated.py  a launcher that another launcher starts several times
    enter.py     bind this process and become the command
"""
