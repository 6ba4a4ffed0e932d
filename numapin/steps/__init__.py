"""The steps of an unmodified script: counted in its ranks, read by the command that started them.

::

    record.py    what a rank measures, and its measurements, as data
    recorder.py  the hook in torch: steps, batches and waits of a rank, and its window
    job.py       the ranks' files, the output and the processes of a job, and how it is stopped
"""
