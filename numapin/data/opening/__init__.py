"""Turn a parcel into the user's batch.

::

    host.py     over the slot itself, or over copies in host memory
    device.py   on a GPU: one copy per batch, ahead of time
    capture.py  keep our events out of CUDA-graph captures
"""
