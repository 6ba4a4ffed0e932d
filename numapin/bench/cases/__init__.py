"""The cases and peers of each benchmark, as data.

::

    transfer.py  copies between each kind of memory and each GPU
    alloc.py     allocation and first write
    overlap.py   training loops bound by transfer, compute or loading
    loader.py    DataLoaders
"""
