"""The part that runs in a DataLoader worker.

Comes in: `WorkerStart`, and the batches that torch collates. Goes out: messages for the rank.

::

    setup.py    EDGE  bind the worker, install what puts batches into slots
    slots.py    EDGE  the worker's end of the slots: use a granted one, or make one
    garbage.py  EDGE  do not destroy what was inherited from a rank that uses CUDA
    owner.py    EDGE  end a worker when its rank ends
    threads.py  EDGE  limit the threads of libraries
    state.py    EDGE  report the state of its dataset, and restore it
    stacking.py EDGE  stack samples straight into the batch's memory
    packing.py  EDGE  put a batch into a slot
    pickling.py EDGE  pickle a batch, with its memory out of band
    storages.py PURE  the memory of tensors
    narrow.py   EDGE  cast tensors while they are packed
"""
