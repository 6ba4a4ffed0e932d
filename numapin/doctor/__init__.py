"""What on a machine keeps a job from being fast or safe, and the command that mends it.

Comes in: a `Topology`, and a root directory that is the live machine or a capture. Goes out: a `Report` of findings.

::

    model.py      PURE  Readings, Live, Check, Finding, Report (schema numapin.doctor/1)
    files.py      EDGE  /proc and /sys below a root -> Readings
    live.py       EDGE  what only the running machine answers: calls that are tried, NVML, the environment -> Live
    placement.py  PURE  checks of nodes, cpusets, memory and memory policies
    host.py       PURE  checks of the kernel's settings and of the hardware
    software.py   PURE  checks of the driver, NCCL, libraries and environment variables
    advice.py     PURE  "should you pin?"
    examine.py    PURE  every check in order
"""
