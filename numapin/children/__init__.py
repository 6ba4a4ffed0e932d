"""`numapin exec --children`: bind the processes that a command starts, and that end up with a GPU.

::

    table.py      the plan as each Python below the command finds it in its environment, and the GPU that a process uses
    frameworks.py frameworks that bind their own processes, and what switches that off
    own.py        bind this process, with all its threads, once its GPU is known
    records.py    the record that a process leaves in the run's folder, and what it says
    command.py    start the command, wait for it, report what was bound
    call.py       numapin.bind_this_process
"""
