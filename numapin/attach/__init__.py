"""`numapin attach`: bind processes that run already.

::

    targets.py  the processes to bind, each with its GPU and its plan
    bind.py     attach itself: bind all threads, then find and move pages
    report.py   what was done, as data, its JSON, and the commands that undo it
"""
