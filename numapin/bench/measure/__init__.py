"""The measuring processes, one module per benchmark. Edge.

Comes in: one case. Goes out: its figures, to the harness.

::

    transfer.py        EDGE  `bench transfer`
    alloc.py           EDGE  `bench alloc`
    overlap.py         EDGE  `bench overlap`
    loader.py          EDGE  `bench loader`
    loader_data.py     EDGE  the in-memory dataset that all loaders read, and its batches
    loader_peers.py    EDGE  numapin, torch, torchdata
    loader_spdl.py     EDGE  SPDL
    loader_samples.py  EDGE  processes that only make samples
    loader_threads.py  EDGE  threads that stack into pinned memory
    train.py           EDGE  `bench train`: the launcher of the ranks
    train_wire.py      EDGE  its connection to each rank
    train_rank.py      EDGE  a rank: warm-up, windows, figures
    train_step.py      EDGE  a model, its optimizer, and one step
    train_models.py    EDGE  the networks
    train_data.py      EDGE  the samples: float32, JPEG files, tokens
    train_feeds.py     EDGE  torch, numapin, SPDL, DALI, and the ceiling
    train_usage.py     EDGE  CPU time, memory and CPUs of a rank and its workers
    buffers.py         EDGE  host memory of every kind, on a chosen node
"""
