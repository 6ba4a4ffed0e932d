"""The measuring processes, one module per benchmark. Edge.

Comes in: one case. Goes out: its figures, to the harness.

::

    transfer.py        EDGE  `bench transfer`
    alloc.py           EDGE  `bench alloc`
    overlap.py         EDGE  `bench overlap`
    loader.py          EDGE  `bench loader`
    loader_data.py     EDGE  the in-memory dataset that all loaders read, and its batches
    loader_peers.py    EDGE  numapin, torch
    loader_samples.py  EDGE  processes that only make samples
    buffers.py         EDGE  host memory of every kind, on a chosen node
"""
