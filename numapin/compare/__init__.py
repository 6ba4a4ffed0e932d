"""`numapin compare`: the step time of a script under several launchers, with intervals. Edge but for the pure modules.

Comes in: variants (launchers with options, or two commands) and a script. Goes out: a report of their step times, their
ratios with intervals, and whether they differ.

::

    record.py      PURE  what a rank measures, and its measurements, as data
    hook.py        EDGE  the hook in torch: steps, batches and waits of a rank, and its window
    variants.py    PURE  variants and their command lines
    usage.py       EDGE  CPU time, memory and GPU load of a job's processes
    figures.py     PURE  the figures of one run
    job.py         EDGE  one run: start, watch, stop; its output, and what its ranks have measured
    measure.py     EDGE  all runs, in turn, and the time that is left
    ratio.py       PURE  the ratio of two variants with its interval, the verdict, and doubts about it
    results.py     PURE  the results of one variant over its runs
    notes.py       PURE  what a reader of the ratios has to know
    report.py      PURE  the report as data, JSON and sentences
"""
