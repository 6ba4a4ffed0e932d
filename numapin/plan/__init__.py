"""Stage 2: which CPUs and which memory each rank gets.

::

    request.py  the options that a plan is made for
    model.py    Plan and RankPlan, and their JSON
    make.py     make_plan: the stage itself, step by step
    usable.py   the usable part of a machine, indexed for planning
    gpus.py     the GPU of each rank, and the environment that shows CUDA the GPUs of --gpus
    nics.py     the variables that name each rank's NIC to UCX and NVSHMEM
"""
