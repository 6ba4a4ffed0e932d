"""The slots that batches travel in, at the rank's end.

::

    sizes.py       the size of a new slot, and which slots are worth keeping
    slot.py        one slot: its memory, its lease, its pinning
    free.py        the free slots, and the choice of one for a worker
    pool.py        all slots of a loader: lend them, take them back, hand them to workers
    settling.py    a thread that checks and pins new slots
    quarantine.py  hold slots back while a GPU may read them
    ending.py      let the threads come to rest before Python ends
    reclaim.py     a thread that unpins memory once no GPU reads it
    handover.py    a socket on which descriptors travel
    mapping.py     map a slot's memory
"""
