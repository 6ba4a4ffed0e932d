"""Stage 1: the machine as data.

::

    address.py    PCI addresses: one spelling, one order
    model.py      the parts of a machine, Topology with its queries and JSON
    readings.py   the readers' findings; the meaning of PCI classes and speeds
    nics.py       network devices, each with all of its names; links; the nearest NICs of each GPU
    visible.py    the effect of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER on the list of GPUs
    vendors.py    the GPU vendors: one table of what differs between their runtimes
    fast.py       the cores of a node that are faster than its others
    build.py      readings -> Topology: decides which source to believe
    discover.py   the only place that combines the sources; the built-in machines (machines/)
    sources/      one module per source
"""
