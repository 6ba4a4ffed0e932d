"""`numapin bench`: benchmarks of transfers, allocation, overlap and loaders.

Comes in: the options of a benchmark. Goes out: a report (schema numapin.bench/1).

::

    cases/      PURE  what each benchmark compares, as data; no torch
    harness.py  EDGE  run the peers in turn, each in its own process
    child.py    EDGE  the measuring process's end of the protocol
    python.py   PURE  command lines of Python that do not import from the working directory
    measure/    EDGE  the measuring processes
    model.py    PURE  benchmarks and results as data: medians, spreads, ratios, JSON
    verdict.py  PURE  the answer to a benchmark's question, in one line
    machine.py  EDGE  the host, versions and GPUs that the figures depend on
"""
