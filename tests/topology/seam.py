"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base import cpu_set
from numapin.base.bounds import MAX_GPUS
from numapin.base.cpu_set import CpuSet
from numapin.plan.gpus import settle_gpus
from numapin.system import calls, tree
from numapin.topology import discover as reader
from numapin.topology.build import build, with_gpu_nodes
from numapin.topology.fast import fast_cores
from numapin.topology.model import Mig, NodeKind, NodeSource, Pcie
from numapin.topology.nics import NicKind
from numapin.topology.readings import NvmlReading, NvmlReadings, PciReading, Readings
from numapin.topology.sources import sysfs, xmlfile
from numapin.topology.sources.gpu_drivers import read_amd, read_intel
from numapin.topology.sources.hwloc import read_hwloc
from numapin.topology.sources.nccl import nccl_nodes, read_nccl
from numapin.topology.sources.sysfs import read_sysfs
from numapin.topology.vendors import BY_PCI_ID, PCI_ORDER, GpuVendor, first_visible
