"""The measuring processes, one module per benchmark.

::

    transfer.py        `bench transfer`
    alloc.py           `bench alloc`
    overlap.py         `bench overlap`
    loader.py          `bench loader`
    loader_data.py     the in-memory dataset that all loaders read, and its batches
    loader_peers.py    numapin, torch
    loader_samples.py  processes that only make samples
    buffers.py         host memory of every kind, on a chosen node
"""
