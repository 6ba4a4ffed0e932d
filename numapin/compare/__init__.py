"""`numapin compare`: the step time of a script under several launchers, with intervals. Edge but for the pure modules.

Comes in: variants (launchers with options, or two commands) and a script. Goes out: a report of their step times, their
ratios with intervals, and whether they differ.

::

    settings.py   PURE  the steps that ranks measure, and their record file
    window.py     PURE  which steps of a loop are measured
    record.py     PURE  the measurements of a rank, as data
    hook.py       EDGE  the hook in a rank: its steps, batches and waits
    variants.py   PURE  variants and their command lines
    schedule.py   PURE  the order of the runs, and the time that is left
    usage.py      EDGE  CPU time, memory and GPU load of a job's processes
    figures.py    PURE  the figures of one run
    job.py        EDGE  one run: start, watch, stop
    measure.py    EDGE  all runs, in turn
    ratio.py      PURE  ratios with bootstrap intervals, and verdicts
    report.py     PURE  the report as data and JSON
"""
