"""Stage 2: which CPUs and which memory each rank gets. Pure.

Comes in: a `Topology` and a `Request`. Goes out: a `Plan`, with a reason for every decision.

::

    request.py  PURE  the options that a plan is made for
    model.py    PURE  Plan and RankPlan, and their JSON
    make.py     PURE  make_plan: the stage itself, step by step
    usable.py   PURE  the usable part of a machine, indexed for planning
    gpus.py     PURE  the GPU of each rank, and the environment that shows CUDA the GPUs of --gpus
    nics.py     PURE  the variables that name each rank's NIC to UCX and NVSHMEM
"""
