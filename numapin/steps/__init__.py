"""The steps of an unmodified script: counted in its ranks, read by the command that started them.

::

    record.py    what a rank measures, and its measurements, as data
    recorder.py  the hook in torch: the batches and steps of a process, for its listeners and `numapin top`
    totals.py    the waiting of a process's loops, published for `numapin top`
    meter.py     the listener of `numapin compare`: a window of steps, written to the rank's file
    job.py       the ranks' files, the output and the processes of a job, and how it is stopped
"""
