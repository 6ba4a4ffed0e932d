"""The slots that batches travel in, at the rank's end.

Comes in: memory that workers made, and heads of batches. Goes out: views for batches, slots for workers.

::

    sizes.py       PURE  the size of a new slot, and which slots are worth keeping
    slot.py        EDGE  one slot: its memory, its lease, its pinning
    free.py        PURE  the free slots, and the choice of one for a worker
    pool.py        EDGE  all slots of a loader: lend them, take them back, hand them to workers
    settling.py    EDGE  a thread that checks and pins new slots
    quarantine.py  EDGE  hold slots back while a GPU may read them
    ending.py      EDGE  let the threads come to rest before Python ends
    reclaim.py     EDGE  a thread that unpins memory once no GPU reads it
    handover.py    EDGE  a socket on which descriptors travel
    mapping.py     EDGE  map a slot's memory
"""
