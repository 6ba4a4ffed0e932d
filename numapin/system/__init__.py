"""The kernel, libc, libnuma and the CUDA driver: each fact about them is in one module here.

Comes in: addresses, process ids, modes, paths. Goes out: the kernel's answer, or an error with its errno.

::

    calls.py      EDGE  the ctypes table of all libnuma and libc functions that are called
    numa.py       EDGE  memory policies, and the nodes of pages
    memory.py     EDGE  map, fault in, zero and copy memory
    whole_process.py  EDGE  all threads of a process: bind them; count its memory by node
    threads.py    EDGE  limit the threads of BLAS, MKL and OpenMP libraries
    process.py    EDGE  how this process ends
    affinity.py   EDGE  the CPUs of the threads of other processes
    migrate.py    EDGE  move pages of other processes to a node
    placement.py  EDGE  place a range of memory on a node and verify it
    proc.py       EDGE  read /proc/PID
    peers.py      EDGE  the users at the other ends of TCP connections
    numa_maps.py  PURE  parse numa_maps
    cgroup.py     EDGE  the cgroups of this process and their mounts
    oom.py        EDGE  whether the kernel's out-of-memory killer ended a rank
    tree.py       EDGE  small files of sysfs and procfs below any root
    cuda.py       EDGE  CUDA driver calls that torch lacks
    nccl.py       PURE  NCCL's effect on the CPU affinity
    nccl_files.py EDGE  the version of an NCCL library
    openmp.py     PURE  variables that make OpenMP bind threads
    refusals.py   PURE  remedies for refused NUMA calls
    stores.c            copies that bypass the caches
"""
