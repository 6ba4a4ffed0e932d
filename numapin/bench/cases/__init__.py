"""The cases and peers of each benchmark, as data. Pure.

Comes in: the options of a benchmark. Goes out: its cases.

::

    transfer.py  PURE  copies between each kind of memory and each GPU
    alloc.py     PURE  allocation and first write
    overlap.py   PURE  training loops bound by transfer, compute or loading
    loader.py    PURE  DataLoaders
"""
