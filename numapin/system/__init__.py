"""The kernel, libc, libnuma and the CUDA driver: each fact about them is in one module here.

::

    calls.py          the ctypes table of all libnuma and libc functions that are called
    numa.py           memory policies, and the nodes of pages
    memory.py         map, fault in, zero and copy memory
    pages.py          place pages on nodes and verify it; move pages of other processes
    threads.py        the CPUs of the threads of other processes
    thread_limits.py  limit the threads of BLAS, MKL and OpenMP libraries
    proc.py           read /proc/PID
    peers.py          the users at the other ends of TCP connections
    numa_maps.py      read numa_maps: policies of mappings, nodes of their pages
    cgroup.py         the cgroups of this process and their mounts; kills for lack of memory
    tree.py           small files of sysfs and procfs below any root
    cuda.py           CUDA driver calls that torch lacks
    libraries.py      the effects of NCCL, OpenMP and CPython on ranks, by version
    nccl_files.py     the version of an NCCL library
    refusals.py       remedies for refused NUMA calls
    stores.c          copies that bypass the caches
"""
