"""The slots that batches travel in, at the rank's end.

::

    sizes.py       the size of a new slot, which slots are worth keeping, and the choice of a free one
    slot.py        one slot: its memory, its lease, its pinning
    pool.py        all slots of a loader: lend them, take them back, hand them to workers
    settling.py    a thread that checks and pins new slots
    quarantine.py  hold memory back while a GPU may read it
    reclaim.py     a thread that unpins memory once no GPU reads it
    handover.py    a socket on which descriptors travel
    mapping.py     map a slot's memory
"""
