"""`numapin bench`: benchmarks of transfers, allocation, overlap and loaders.

A benchmark's file has its cases and columns first, without torch, and then what its processes measure.

::

    transfer.py  copies between each kind of memory and each GPU
    alloc.py     allocation and first write
    overlap.py   training loops bound by transfer, compute or loading
    loader.py    DataLoaders
    buffers.py   host memory of every kind, on a chosen node
    process.py   run the peers in turn, each in its own process
    model.py     benchmarks and results as data: medians, spreads, ratios, JSON
    verdict.py   the answer to a benchmark's question, in one line
    machine.py   the host, versions and GPUs that the figures depend on
"""
