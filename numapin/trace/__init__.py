"""`numapin trace`: where the step time of a training script goes.

Comes in: a Chrome trace as Kineto writes it. Goes out: where each step's time went, how batches were copied, and
what to change.

::

    settings.py   PURE  which steps the ranks record, and where
    watch.py      EDGE  periodic calls in the main thread, to end a trace whose next step does not come
    hook.py       EDGE  the hook in a rank: batches and steps of an unmodified script
    notes.py      EDGE  the rank's notes about its script: loaders, epochs, optimizer, CPUs
    sampling.py   EDGE  stack samples of the loop's thread
    tracer.py     EDGE  torch's profiler around the recorded steps
    reading.py    EDGE  read a Chrome trace
    noted.py      PURE  the notes and samples in it
    records.py    PURE  its events as data
    intervals.py  PURE  unions and overlaps of time intervals
    analysis.py   PURE  where the time of each step went
    pace.py       PURE  which steps count, and when the next one is overdue
    findings.py   PURE  what costs time, and what to change, in a rank and between ranks
    report.py     PURE  the ranks' analyses and findings as data and JSON
"""
