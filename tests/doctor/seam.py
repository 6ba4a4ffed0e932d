"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.doctor.check import GpuUser, Host, KernelLog, Live, Xid
from numapin.doctor.model import DoctorFinding, examine
from numapin.system.tree import Tree
from numapin.topology.model import NodeSource
from numapin.topology.readings import GpuHealth, NvmlReading, NvmlReadings
from numapin.topology.vendors import GpuVendor
