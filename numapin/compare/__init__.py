"""`numapin compare`: the step time of a script under several launchers, with intervals. Edge but for the pure modules.

Comes in: variants (launchers with options, or two commands) and a script. Goes out: a report of their step times, their
ratios with intervals, and whether they differ.

::

    settings.py    PURE  the steps that ranks measure, and their record file
    window.py      PURE  which steps of a loop are measured
    record.py      PURE  the measurements of a rank, as data
    meter.py       EDGE  the steps, batches and waits of a rank
    hook.py        EDGE  the hook in torch that feeds the meter
    variants.py    PURE  variants and their command lines
    schedule.py    PURE  the order of the runs, and the time that is left
    usage.py       EDGE  CPU time, memory and GPU load of a job's processes
    figures.py     PURE  the figures of one run
    rank_files.py  EDGE  what the ranks of a run have measured so far
    output.py      EDGE  the output of a run, in a file that stays small
    stopping.py    EDGE  the end of a run
    job.py         EDGE  one run: start, watch, stop
    measure.py     EDGE  all runs, in turn
    ratio.py       PURE  ratios with bootstrap intervals, and verdicts
    arms.py        PURE  the ratio of two variants, and doubts about it
    results.py     PURE  the results of one variant over its runs
    notes.py       PURE  what a reader of the ratios has to know
    report.py      PURE  the report as data, JSON and sentences
"""
