"""The threads and pages of a running job, compared with its plan.

Comes in: process ids, or the folder of a run. Goes out: `Observed`, and a `VerifyReport`.

::

    model.py       PURE  threads and pages, as data
    read.py        EDGE  read them from /proc
    find_job.py    EDGE  find a running job and its plan
    verify.py      PURE  compare what was observed with the plan
    report.py      PURE  the result, as data
    during_run.py  EDGE  verify while `numapin run` is running
    loaders.py     EDGE  report which loaders took numapin's data path
    sample.py      EDGE  read again and again at little cost
    top.py         PURE  the activity between two samples, and the pace over the last ones
"""
