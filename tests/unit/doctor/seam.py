"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.doctor import live
from numapin.doctor.check import CHECKS, DoctorSeverity, Host
from numapin.doctor.live import read_confinement, read_module_version
from numapin.doctor.model import examine
from numapin.system import nccl_files, numa
from numapin.system.tree import Tree
from numapin.topology.model import NodeSource
from numapin.topology.nics import NicKind
from numapin.topology.readings import NvmlReading, NvmlReadings
from numapin.topology.vendors import GpuVendor

if TYPE_CHECKING:
    from numapin.doctor.model import DoctorFinding
