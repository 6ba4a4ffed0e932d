"""`numapin.spawn`: call a function in bound ranks.

::

    call.py     `spawn` itself: plan, start the ranks, collect their answers
    child.py    the program of each rank
"""
