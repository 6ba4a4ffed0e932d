"""The sources of the topology, one module each.

Comes in: a file's text, a root directory, or the live host. Goes out: readings for `build`.

::

    sysfs.py    EDGE  cores, caches, packages, nodes, the cpuset
    pci.py      EDGE  GPUs and NICs of sysfs
    libnuma.py  EDGE  nodes, distances, memory and allowed nodes of the live host
    nvml.py     EDGE  GPUs of the live host
    xmlfile.py  PURE  XML text -> elements that know their line
    hwloc.py    PURE  hwloc 2 and 3 XML
    nccl.py     PURE  NCCL topology XML
"""
