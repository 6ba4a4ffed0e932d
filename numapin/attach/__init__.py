"""`numapin attach`: bind processes that run already, and undo that.

Comes in: process ids, or a run. Goes out: bound threads, moved pages, and a report of what was done and what was not.

::

    processes.py  EDGE  the processes that may be changed, and their descendants
    gpus.py       PURE  the GPU of a process
    cpuset.py     EDGE  the CPUs that can be planned with
    targets.py    EDGE  the processes to bind, each with its plan
    changes.py    PURE  what was done, as data, and its JSON
    bind.py       EDGE  bind all threads
    pages.py      EDGE  where a process's pages are; move them
    perform.py    EDGE  attach itself: bind, then move
    record.py     EDGE  the CPUs before the change, in a file
    restore.py    EDGE  set the threads back
"""
