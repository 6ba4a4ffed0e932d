"""`numapin exec --children`: bind the processes that a command starts, and that end up with a GPU.

Comes in: a plan with one rank per GPU, and a command that starts processes by itself: a framework's workers, actors,
children of multiprocessing. Goes out: each of these processes bound to its GPU as soon as its GPU is known,
by the hook in every Python below the command (`rank/hook`).

::

    table.py    PURE  the plan as each Python below the command finds it in its environment
    made.py     EDGE  make the table of a command or of a process
    devices.py  PURE  the GPU that a process uses, from its environment and its number of a device
    command.py  EDGE  start the command, wait for it, and report what was bound
    ending.py   EDGE  what the end says, and the status under --strict
    own.py      EDGE  bind this process, with all its threads, once its GPU is known
    reporting.py EDGE the record that a process leaves, and what it says
    records.py  EDGE  the files of bound processes in the run's folder
    watch.py    EDGE  wait for the first CUDA context of a process that never names its device
    call.py     EDGE  numapin.bind_this_process
"""
