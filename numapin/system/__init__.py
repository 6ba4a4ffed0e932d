"""The kernel, libc, libnuma and the CUDA driver: each fact about them is in one module here.

::

    calls.py          the ctypes table of all libnuma and libc functions that are called
    numa.py           memory policies, and the nodes of pages
    memory.py         map, fault in, zero and copy memory
    whole_process.py  all threads of a process: bind them; count its memory by node
    threads.py        limit the threads of BLAS, MKL and OpenMP libraries
    process.py        how this process ends
    affinity.py       the CPUs of the threads of other processes
    migrate.py        move pages of other processes to a node
    placement.py      place a range of memory on a node and verify it
    proc.py           read /proc/PID
    peers.py          the users at the other ends of TCP connections
    numa_maps.py      parse numa_maps
    cgroup.py         the cgroups of this process and their mounts
    oom.py            whether the kernel's out-of-memory killer ended a rank
    tree.py           small files of sysfs and procfs below any root
    cuda.py           CUDA driver calls that torch lacks
    nccl.py           NCCL's effect on the CPU affinity
    nccl_files.py     the version of an NCCL library
    openmp.py         variables that make OpenMP bind threads
    refusals.py       remedies for refused NUMA calls
    stores.c          copies that bypass the caches
"""
