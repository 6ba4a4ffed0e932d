"""Turn a parcel into the user's batch.

Comes in: `Parcel`s. Goes out: batches on the host or on the device.

::

    host.py     EDGE  over the slot itself, or over copies in host memory
    device.py   EDGE  on a GPU: one copy per batch, ahead of time
    capture.py  EDGE  keep our events out of CUDA-graph captures
"""
