"""`numapin trace`: where the step time of a training script goes.

::

    hook.py      the hook in a rank: batches and steps of an unmodified script
    script.py    the rank's notes about its script (loaders, epochs, CPUs), and stack samples of its loop
    tracer.py    torch's profiler around the recorded steps, and the end of a trace whose next step is overdue
    reading.py   read Chrome traces, and the folders of earlier runs
    records.py   a trace's events, notes and samples as data
    analysis.py  where the time of each step went, by unions and overlaps of time intervals
    findings.py  what costs time, and what to change, in a rank and between ranks
    report.py    the ranks' analyses and findings as data and JSON
"""
