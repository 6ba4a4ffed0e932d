"""What runs in a DataLoader worker.

Comes in: `WorkerStart`, and the batches that torch collates. Goes out: messages for the rank.

::

    setup.py    EDGE  bind the worker and install the packer
    packing.py  EDGE  put a batch into a slot
"""
