"""`numapin exec`: bind one rank that another launcher started.

::

    identify.py  which rank of its host this process is, and whether it is a launcher that was started several times
    slice.py     this task's part of an existing plan, or of one that is made here
    enter.py     find that plan, bind this process and become the command
"""
