"""The faults of a machine that make jobs slow or unsafe, with the commands that fix them.

::

    check.py     what a check takes and returns, and the list of all checks
    machine.py   checks of nodes, cpusets, memory, kernel settings and PCIe
    network.py   checks of NICs
    nvidia.py    checks of NVIDIA GPUs' memory, clocks and processes, and of the driver's errors in the kernel log
    software.py  checks of the driver, NCCL and libraries
    live.py      facts of the running machine: system calls, NVML, packages -> Live
    model.py     all checks run once, and the report (schema numapin.doctor/1)
"""
