"""GPU vendors, one module each: everything that differs between them below the plan.

Comes in: PCI devices with a `Tree` to read more from, or GPUs and an environment. Goes out: readings of the vendor's
driver, the GPUs that its runtime shows a process, and the variables that choose GPUs.

::

    seam.py    PURE  the functions that a vendor has
    lists.py   PURE  lists of devices such as HIP_VISIBLE_DEVICES=0,2
    nvidia.py  PURE  /proc/driver/nvidia, CUDA's variables
    amd.py     PURE  the KFD topology with its partitions and xGMI links, ROCr's and HIP's variables
    intel.py   PURE  tiles, Level Zero's variables
    table.py   PURE  all vendors, and what holds for a machine with GPUs of several
"""
