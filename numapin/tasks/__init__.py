"""Processes that another launcher started: ranks, which `numapin exec` binds, or one `numapin run` on each host.

::

    identify.py  which rank of its host this process is, and whether it is a launcher that was started several times
    hosts.py     which host of a job this is, if `numapin run` was started once on each of several; lists of hosts
    slice.py     this task's part of an existing plan, or of one that is made here
    enter.py     find that plan, bind this process and become the command
"""
