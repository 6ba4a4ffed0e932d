"""`numapin attach`: bind processes that run already.

Comes in: process ids, or a run. Goes out: bound threads, moved pages, and a report of what was done and what was not.

::

    targets.py  EDGE  the processes to bind, each with its GPU and its plan
    bind.py     EDGE  attach itself: bind all threads, then move pages
    pages.py    EDGE  where a process's pages are; move them
    report.py   PURE  what was done, as data, its JSON, and the commands that undo it
"""
