"""The threads and pages of a running job, compared with its plan.

::

    model.py       threads and pages, as data
    read.py        read them from /proc
    below.py       the ranks at and below given processes, and the GPU of each
    find_job.py    find a running job and its plan
    verify.py      compare what was observed with the plan
    during_run.py  verify while `numapin run` is running; which loaders took numapin's data path
    sample.py      read again and again at little cost
    top.py         the activity between two samples, and the pace over the last ones
"""
