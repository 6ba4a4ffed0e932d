"""Where the ranks of a running job, their threads and their pages are.

Comes in: process ids, or the folder of a run. Goes out: `Observed`, and a `Report` against the plan.

::

    model.py       PURE  what was observed, as data
    read.py        EDGE  read it from /proc
    find_job.py    EDGE  find a running job and its plan
    verify.py      PURE  does the observation hold the plan?
    report.py      PURE  what was requested, applied and observed, as data
    during_run.py  EDGE  verify while `numapin run` is running
    sample.py      EDGE  read again and again at little cost
    top.py         PURE  what changed from one sample to the next
"""
