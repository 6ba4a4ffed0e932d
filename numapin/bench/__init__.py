"""`numapin bench`: benchmarks of transfers, allocation, overlap and loaders.

::

    cases/      what each benchmark compares, as data; no torch
    harness.py  run the peers in turn, each in its own process
    child.py    the measuring process's end of the protocol
    python.py   command lines of Python that do not import from the working directory
    measure/    the measuring processes
    model.py    benchmarks and results as data: medians, spreads, ratios, JSON
    verdict.py  the answer to a benchmark's question, in one line
    machine.py  the host, versions and GPUs that the figures depend on
"""
