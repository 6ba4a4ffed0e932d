"""`numapin.share`: one data set in memory for all ranks of a host and their workers.

::

    call.py     numapin.share: the first rank makes the memory, the others receive it
    meeting.py  how the ranks of a host meet: a socket over which the first rank sends descriptors
    sealed.py   the memory: a sealed file without a name, its pages placed on nodes
    layout.py   write data into that memory; read it: entries are decoded on access, arrays are views
    passing.py  pass shared arrays and tensors to new processes without copying them
"""
