"""`numapin exec --children`: bind the processes that a command starts, and that end up with a GPU.

::

    table.py      the plan as each Python below the command finds it in its environment
    made.py       make the table of a command or of a process
    devices.py    the GPU that a process uses, from its environment and its number of a device
    command.py    start the command, wait for it, and report what was bound
    ending.py     what the end says, and the status under --strict
    own.py        bind this process, with all its threads, once its GPU is known
    reporting.py  the record that a process leaves, and what it says
    records.py    the files of bound processes in the run's folder
    watch.py      wait for the first CUDA context of a process that never names its device
    call.py       numapin.bind_this_process
"""
