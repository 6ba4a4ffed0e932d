"""`numapin compare`: the step time of a script under several launchers, with intervals.

::

    variants.py  variants and their command lines
    campaign.py  all runs in turn: start, watch, stop, and the time that is left
    report.py    figures, ratios and notes as data, JSON and sentences
"""
