"""Stage 1: the machine as data.

Comes in: a live Linux host, or a description of one (a sysfs root, our JSON, hwloc XML, NCCL XML).
Goes out: one frozen `Topology`.

::

    address.py       PURE  PCI addresses: one spelling, one order
    parts.py         PURE  the parts of a machine: nodes, cores, GPUs, links
    model.py         PURE  Topology: the parts together, queries, restrict(), JSON
    readings.py      PURE  the readers' findings; the meaning of PCI classes and speeds
    adapters.py      PURE  network devices, each with all of its names
    nearest_nics.py  PURE  the nearest NICs of each GPU, shared fairly
    visible.py       PURE  the effect of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER on the list of GPUs
    vendors.py       PURE  the GPU vendors: one table of what differs between their runtimes
    gpus.py          PURE  readings -> GPUs, NICs, and the node of each: decides which source to believe
    fast.py          PURE  the cores of a node that are faster than its others
    links.py         PURE  readings -> links between GPUs and NICs
    build.py         PURE  readings -> Topology
    examples.py      EDGE  built-in machines, each a machine file in machines/
    discover.py      EDGE  the only place that combines the sources
    sources/               one module per source
"""
