"""`numapin compare`: the step time of a script under several launchers, with intervals.

::

    record.py    what a rank measures, and its measurements, as data
    hook.py      the hook in torch: steps, batches and waits of a rank, and its window
    variants.py  variants and their command lines
    usage.py     CPU time, memory and GPU load of a job's processes
    figures.py   the figures of one run
    job.py       one run: start, watch, stop; its output, and what its ranks have measured
    measure.py   all runs, in turn, and the time that is left
    ratio.py     the ratio of two variants, and doubts about it
    results.py   the results of one variant over its runs
    notes.py     what a reader of the ratios has to know
    report.py    the report as data, JSON and sentences
"""
