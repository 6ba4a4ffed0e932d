"""The threads and pages of a running job, compared with its plan.

::

    model.py       threads and pages, as data
    read.py        read them from /proc
    find.py        find a running job: its ranks, at and below given processes too, their GPUs, and its plan
    verify.py      compare what was observed with the plan
    during_run.py  verify while `numapin run` is running; which loaders took numapin's data path
    top.py         the activity between two samples, and the pace over the last ones
    node.py        all runs of a host, sampled together; the batch system's job and the pod of each
"""
