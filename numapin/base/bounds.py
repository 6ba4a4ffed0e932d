"""The largest numbers that numapin accepts, in one place.

Each bound is well above any machine or job that exists. It is also low enough that reading 5 MB of any content takes
seconds and some hundred MB of memory at most.

Each rank imports this before its program starts: constants only.
"""

from __future__ import annotations

MAX_CPUS = 8192  # of a machine, and one more than the highest CPU or node number: the most that Linux can have
MAX_NODES = 1024  # NUMA nodes of a machine: the kernel's MAX_NUMNODES with the largest NODES_SHIFT (10)
MAX_PACKAGES = 1024  # packages of a machine; the largest have 32, and a package without a node would be idle
MAX_GPUS = 256  # GPUs of a host; NVIDIA's driver supports at most 128 per process, and the largest hosts have 32
MAX_MIG = 64  # MIG instances of a GPU; NVIDIA's GPUs have at most 7
MAX_NICS = 4096  # network interfaces of a host on PCI: 16 adapters with 256 virtual functions each
MAX_DEVICES = MAX_GPUS + MAX_NICS  # GPUs and NICs together: with more, one of the two bounds is exceeded
MAX_LINKS = 1 << 16  # links between GPUs and NICs: enough for 360 devices, each linked to each
MAX_RANKS = 4096  # of one host: half the bound on CPUs; hosts without GPUs may run many, but not one per two CPUs
MAX_TEXTS = 4096  # notes, warnings and words of a command line
MAX_NUMBER = 2**63 - 1  # the largest number in a file: sizes in bytes fit into 63 bits
MAX_LIST_CHARS = 1 << 16  # of a list or mask of CPUs; a list of every other of 8192 CPUs has 20 KB, a mask 2.3 KB
MAX_LISTED = 1 << 17  # numbers in all distinct CPU and node lists of one file: each of 8192 CPUs in 16 lists
MAX_ELEMENTS = 1 << 17  # elements of an XML file; hwloc writes about 12 for each CPU with its caches
MAX_PARENTS = 32  # PCI bridges above a device that are read; the deepest trees have about 20
MAX_CGROUPS = 64  # cgroup hierarchies of a process; Linux has 14 controllers, each in at most one
MAX_CGROUP_DEPTH = 128  # nested cgroups: systemd, a container runtime and Kubernetes together use about 10
