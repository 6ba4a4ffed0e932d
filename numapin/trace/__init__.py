"""`numapin trace`: where the step time of a training script goes.

::

    hook.py       the hook in a rank: batches and steps of an unmodified script
    notes.py      the rank's notes about its script: loaders, epochs, optimizer, CPUs
    sampling.py   stack samples of the loop's thread
    tracer.py     torch's profiler around the recorded steps
    reading.py    read a Chrome trace
    noted.py      the notes and samples in it
    records.py    its events as data
    intervals.py  unions and overlaps of time intervals
    analysis.py   where the time of each step went
    overdue.py    when the next step is overdue, and the calls in the main thread that notice it
    findings.py   what costs time, and what to change, in a rank and between ranks
    report.py     the ranks' analyses and findings as data and JSON
"""
