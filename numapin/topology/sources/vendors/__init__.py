"""GPU vendors, one module each: everything that differs between them except the files of their drivers.

Comes in: GPUs and an environment. Goes out: the GPUs that a vendor's runtime shows a process, and the variables that
choose GPUs. The files of the drivers are read by sources/{nvidia,amd,intel}_driver.py.

::

    seam.py    PURE  VendorSupport: what every vendor has
    lists.py   PURE  lists of devices such as HIP_VISIBLE_DEVICES=0,2
    nvidia.py  PURE  CUDA's variables
    amd.py     PURE  ROCr's and HIP's variables
    intel.py   PURE  Level Zero's variables
    table.py   PURE  all vendors, and what holds for a machine with GPUs of several
"""
