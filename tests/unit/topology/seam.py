"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.topology import discover as reader
from numapin.topology.build import build
from numapin.topology.model import NodeKind, NodeSource
from numapin.topology.readings import NvmlReading, NvmlReadings
from numapin.topology.sources import sysfs, xmlfile
from numapin.topology.sources.hwloc import read_hwloc
from numapin.topology.sources.nccl import nccl_nodes, read_nccl
from numapin.topology.sources.sysfs import read_sysfs
from numapin.topology.vendors import PCI_ORDER

if TYPE_CHECKING:
    from numapin.topology.readings import Readings
