"""`numapin.spawn`: call a function in bound ranks.

::

    call.py     `spawn` itself: plan, start, collect
    ranks.py    wait for the ranks and their answers
    child.py    the program of each rank
"""
