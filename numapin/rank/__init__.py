"""Stage 4: each rank before the user's program starts. The standard library only.

Comes in: the rank's slice of the plan, from its environment. Goes out: the user's program, bound.

::

    shim.py        EDGE  the process that a rank starts as
    bind.py        EDGE  apply a binding and read it back
    become.py      EDGE  let signals through and exec the user's program
    binding.py     EDGE  read the slice that the user's program finds in NUMAPIN_BINDING
    outer.py       EDGE  the note for an `exec --children` above
    signals.py     EDGE  SIGUSR1 and SIGUSR2 from the launcher to the ranks
    handover.py    EDGE  the plan in the run folder, each rank's slice in its environment, one record per rank
    hook_env.py    EDGE  the folder of the hook on PYTHONPATH
    hook/                the sitecustomize.py of Pythons below numapin: errors, and what waits for torch
"""
