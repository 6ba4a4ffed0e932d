"""`numapin trace`: what the steps of a training script were spent on.

Comes in: a Chrome trace as Kineto writes it. Goes out: where each step's time went, how batches were copied, what to
change, and a timeline.

::

    settings.py   PURE  what the ranks are asked to record
    watch.py      EDGE  notice the first step of an unmodified script
    hook.py       EDGE  the hook in a rank
    tracer.py     EDGE  torch's profiler around the recorded steps
    reading.py    EDGE  read a Chrome trace
    records.py    PURE  its events as data
    intervals.py  PURE  unions and overlaps of time intervals
    analysis.py   PURE  where the time of each step went
    pace.py       PURE  what tracing itself costs
    findings.py   PURE  what to change
    report.py     PURE  all of it as data and JSON
    timeline.py   PURE  the picture, as an HTML file
"""
