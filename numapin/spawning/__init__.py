"""`numapin.spawn`: call a function in bound ranks.

::

    call.py     `spawn` itself: plan, start, collect
    ranks.py    wait for the ranks and their answers
    meeting.py  the port where ranks meet, which no other user can take
    child.py    the program of each rank
"""
