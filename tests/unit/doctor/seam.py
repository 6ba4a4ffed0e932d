"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.cli.doctor import doctor
from numapin.doctor import check, live
from numapin.doctor.check import CHECKS, DoctorSeverity, GpuUser, Host, KernelLog
from numapin.doctor.live import read_kernel_log
from numapin.doctor.model import compare, counts_of, parse_expected
from numapin.system import nccl_files, numa, proc
from numapin.system.tree import Tree
from numapin.topology.nics import NicInterface, NicKind
from numapin.topology.readings import GpuHealth, GpuProcess, NvmlReading, NvmlReadings
