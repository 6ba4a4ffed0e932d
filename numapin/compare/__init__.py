"""`numapin compare`: the step time of a script under several launchers, with intervals.

::

    variants.py  variants and their command lines
    figures.py   the figures of one run
    job.py       one run: start, watch, stop
    measure.py   all runs, in turn, and the time that is left
    ratio.py     the ratio of two variants, and doubts about it
    results.py   the results of one variant over its runs
    notes.py     what a reader of the ratios has to know
    report.py    the report as data, JSON and sentences
"""
