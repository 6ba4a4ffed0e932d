"""The sources of the topology, one module each.

::

    sysfs.py        CPUs and their speeds, nodes, the cpuset, GPUs and NICs of the live host or a captured root
    gpu_drivers.py  the files of the GPU drivers: /proc/driver/nvidia, the KFD, i915 and xe
    libnuma.py      nodes, distances, memory and allowed nodes of the live host
    nvml.py         NVIDIA's GPUs of the live host
    xmlfile.py      XML text -> elements that know their line
    hwloc.py        hwloc 2 and 3 XML
    nccl.py         NCCL topology XML
"""
