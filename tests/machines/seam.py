"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_order
from numapin.topology.model import NodeKind, NodeSource
from numapin.topology.readings import NvmlReading, NvmlReadings
