"""The sources of the topology, one module each.

Comes in: a file's text, a root directory, or the live host. Goes out: readings for `build`.

::

    sysfs.py          EDGE  cores, caches, packages, nodes, the cpuset
    speeds.py         EDGE  the speeds of CPUs: highest_perf and cpu_capacity
    pci.py            EDGE  GPUs and NICs of sysfs
    gpu_drivers.py    EDGE  the files of the GPU drivers: /proc/driver/nvidia, the KFD, i915 and xe
    libnuma.py        EDGE  nodes, distances, memory and allowed nodes of the live host
    nvml.py           EDGE  NVIDIA's GPUs of the live host
    xmlfile.py        PURE  XML text -> elements that know their line
    hwloc.py          PURE  hwloc 2 and 3 XML: CPUs, nodes, distances
    hwloc_devices.py  PURE  hwloc XML: GPUs, NICs, links between GPUs
    hwloc_objects.py  PURE  hwloc XML: what both of these need
    nccl.py           PURE  NCCL topology XML
"""
