"""Memory for batches, shared by the rank and its workers.

Comes in: how large batches are. Goes out: slots, lent until nothing refers to them and no copy reads them.

::

    ring.py        EDGE  the rank's end: make slots, lend them, take them back
    control.py     EDGE  the control page, and a worker's own slots
    memory.py      EDGE  the memory itself: placed, faulted in, pinned, checked
    quarantine.py  EDGE  hold released slots until no copy reads them
    reclaim.py     EDGE  unpin memory once no device reads it
"""
