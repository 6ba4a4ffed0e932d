"""The faults of a machine that make jobs slow or unsafe, with the commands that fix them.

Comes in: a `Topology`, and a root directory: the live machine or a capture. Goes out: a `DoctorReport` of findings.

::

    model.py      PURE  DoctorReadings, Live, Check, DoctorFinding, DoctorReport (schema numapin.doctor/1)
    files.py      EDGE  /proc and /sys below a root -> DoctorReadings
    live.py       EDGE  facts of the running machine: system calls, NVML, the environment -> Live
    placement.py  PURE  checks of nodes, cpusets, limits and memory policies
    memory.py     PURE  checks of the host's memory, the nodes' free memory, and swap
    host.py       PURE  checks of kernel settings and hardware
    network.py    PURE  checks of the NICs near GPUs, and of the variables that choose NICs
    software.py   PURE  checks of the driver, NCCL, libraries and environment variables
    advice.py     PURE  advice on pinned memory
    examine.py    PURE  all checks, in order
    script.py     PURE  the remedies as a shell script
"""
