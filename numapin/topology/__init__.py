"""Stage 1: the machine as data.

Comes in: a live Linux host, or a description of one (a sysfs root, our JSON, hwloc XML, NCCL XML).
Goes out: one frozen `Topology`.

::

    address.py   PURE  PCI addresses: one spelling, one order
    parts.py     PURE  the parts of a machine: nodes, cores, GPUs, links
    model.py     PURE  Topology: the parts together, queries, restrict(), JSON
    readings.py  PURE  what a source said, before it is judged; what PCI classes and speeds mean
    visible.py   PURE  what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make of the GPU list
    links.py     PURE  readings -> links between GPUs and NICs
    build.py     PURE  readings -> Topology: which source is believed for a GPU's node
    examples.py  EDGE  machines known by name, each a machine file in machines/
    discover.py  EDGE  the only place that puts the sources together
    sources/           one module a source
"""
