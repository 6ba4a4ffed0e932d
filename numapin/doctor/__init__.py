"""The faults of a machine that make jobs slow or unsafe, with the commands that fix them.

Comes in: a `Topology`, and a root directory: the live machine or a capture. Goes out: a `DoctorReport` of findings.

::

    check.py     PURE  what a check takes and returns, and the list of all checks
    machine.py   EDGE  checks of nodes, cpusets, memory, kernel settings and PCIe
    network.py   PURE  checks of the NICs near GPUs, and of the variables that choose NICs
    software.py  PURE  checks of the driver, NCCL, libraries and environment variables
    live.py      EDGE  facts of the running machine: system calls, NVML, the environment -> Live
    model.py     PURE  all checks run once, and the report (schema numapin.doctor/1)
"""
