"""The measuring processes, one module a benchmark. Edge.

Comes in: one case. Goes out: its figures, to the harness.

::

    transfer.py        EDGE  of `bench transfer`
    alloc.py           EDGE  of `bench alloc`
    overlap.py         EDGE  of `bench overlap`
    launch.py          EDGE  of `bench launch`
    exec.py            EDGE  of `bench exec`
    loader.py          EDGE  of `bench loader`
    loader_data.py     EDGE  the dataset in memory that all loaders read
    loader_peers.py    EDGE  numapin, torch, torchdata
    loader_spdl.py     EDGE  SPDL
    loader_threads.py  EDGE  threads that stack into pinned memory
    buffers.py         EDGE  host memory of every kind, on a chosen node
"""
