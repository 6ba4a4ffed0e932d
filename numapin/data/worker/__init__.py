"""The part that runs in a DataLoader worker.

Comes in: `WorkerStart`, and the batches that torch collates. Goes out: messages for the rank.

::

    setup.py    EDGE  bind the worker, install what puts batches into slots
    slots.py    EDGE  the worker's end of the slots: use a granted one, or make one
    owner.py    EDGE  end a worker when its rank ends
    stacking.py EDGE  stack samples straight into the batch's memory
    packing.py  EDGE  put a batch into a slot
"""
