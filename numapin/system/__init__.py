"""The kernel, libc, libnuma and the CUDA driver: each fact about them lives in one module here.

Comes in: addresses, process ids, modes, paths. Goes out: what the kernel says, or an error with its errno.

::

    calls.py      EDGE  the ctypes table: every libnuma and libc function that is called
    numa.py       EDGE  memory policies, and the nodes of pages
    memory.py     EDGE  map, fault in, zero and copy memory
    process.py    EDGE  what is done to this process itself
    placement.py  EDGE  bring a range of memory to a node, and check where it is
    proc.py       EDGE  everything read below /proc/PID
    numa_maps.py  PURE  the lines of numa_maps
    cgroup.py     EDGE  the cgroups of this process and their mounts
    oom.py        EDGE  whether the kernel's out-of-memory killer ended a rank
    tree.py       EDGE  small files of sysfs and procfs below any root
    cuda.py       EDGE  CUDA driver calls that torch lacks
    openmp.py     PURE  variables that make OpenMP bind threads
    stores.c            copies that bypass the caches
"""
