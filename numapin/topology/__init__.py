"""Stage 1: the machine as data.

Comes in: a live Linux host, or a description of one (a sysfs root, our JSON, hwloc XML, NCCL XML).
Goes out: one frozen `Topology`.

::

    address.py   PURE  PCI addresses: one spelling, one order
    model.py     PURE  Topology and its parts, queries, restrict(), JSON
    readings.py  PURE  what a reader saw, before it is judged; what PCI classes and speeds mean
    visible.py   PURE  what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make of the GPU list
    build.py     PURE  readings -> Topology: which source is believed for a GPU's node
    xmlfile.py   PURE  XML text -> elements that know their line
    hwloc.py     PURE  hwloc 2 and 3 XML -> readings
    nccl.py      PURE  NCCL topology XML -> readings
    tree.py      EDGE  small kernel files below any root directory
    sysfs.py     EDGE  cores, caches, packages, nodes, the cpuset -> readings
    pci.py       EDGE  GPUs and NICs of sysfs -> readings
    libnuma.py   EDGE  nodes, distances, memory and allowed nodes of the live host
    nvml.py      EDGE  GPUs of the live host
    discover.py  EDGE  the only place that puts the readers together
"""
