"""`numapin bench`: what is measured, how, and what comes out of it.

Comes in: which benchmark, with what options. Goes out: a report (schema numapin.bench/1).

::

    cases/      PURE  what each benchmark compares, as data; no torch
    harness.py  EDGE  run the peers in turn, each in a process of its own
    child.py    EDGE  the other end: how a measuring process talks to the harness
    python.py   PURE  how a benchmark starts Python: never from the working directory
    measure/    EDGE  the measuring processes
    model.py    PURE  what was measured: medians, spreads, ratios, JSON
    machine.py  EDGE  what the figures depend on: host, versions, GPUs
"""
