"""Stage 4: each rank before the user's program starts. The standard library only.

::

    shim.py       the process that a rank starts as
    bind.py       apply a binding and read it back
    become.py     let signals through and exec the user's program
    signals.py    SIGUSR1 and SIGUSR2 from the launcher to the ranks
    handover.py   the plan in the run folder, each rank's slice in its environment, one record per rank
    inherited.py  the limit on open files, and variables of an outer rank
    hook_env.py   the variables that bring the hook into Pythons, and commands that refuse it
    hook/         the sitecustomize.py of Pythons below numapin: errors, and what waits for torch
"""
