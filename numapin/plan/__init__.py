"""Stage 2: which CPUs and which memory each rank gets. Pure.

Comes in: a `Topology` and a `Request`. Goes out: a `Plan`, with a reason for every decision.

::

    request.py  PURE  the options that a plan is made for
    model.py    PURE  Plan and RankPlan, and their JSON
    make.py     PURE  make_plan: the stage itself
    gpus.py     PURE  the GPU of each rank, and the environment that shows CUDA the GPUs of --gpus
    usable.py   PURE  the usable part of a machine, indexed for planning
    cpus.py     PURE  the CPUs of each rank
    fast.py     PURE  fast cores, shared evenly among the ranks of a node
    roles.py    PURE  the cores of each role of a rank's threads
    doubts.py   PURE  the facts that the machine's description leaves open
    memory.py   PURE  the memory of each rank
    nics.py     PURE  the NIC of each rank, and the variables that name it to UCX and NVSHMEM
"""
