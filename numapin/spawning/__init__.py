"""`numapin.spawn`: call a function in bound ranks.

Comes in: a function and its arguments. Goes out: what each rank returned.

::

    call.py     EDGE  `spawn` itself: plan, start, collect
    ranks.py    EDGE  wait for the ranks and their answers
    meeting.py  EDGE  the port where ranks meet, which no other user can take
    child.py    EDGE  the program of each rank
"""
