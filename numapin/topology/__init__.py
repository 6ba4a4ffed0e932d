"""Stage 1: the machine as data.

Comes in: a live Linux host, or a description of one (a sysfs root, our JSON, hwloc XML, NCCL XML).
Goes out: one frozen `Topology`.

::

    model.py     PURE  Topology and its parts, queries, restrict(), JSON
    readings.py  PURE  what a reader saw, before it is judged
    build.py     PURE  readings -> Topology: which source is believed for a GPU's node
    visible.py   PURE  what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make of the GPU list
    sysfs.py     EDGE  cores, caches, packages, nodes, PCI below any root directory
    libnuma.py   EDGE  nodes, distances, memory and allowed nodes of the live host
    nvml.py      EDGE  GPUs of the live host
    hwloc.py     EDGE  hwloc 2 and 3 XML -> readings
    nccl.py      EDGE  NCCL topology XML -> readings
    discover.py  EDGE  the only place that puts the readers together
"""
