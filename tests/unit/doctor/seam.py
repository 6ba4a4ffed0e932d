"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.cli.doctor import doctor
from numapin.doctor import live
from numapin.doctor.check import CHECKS, DoctorSeverity, GpuUser
from numapin.doctor.live import read_kernel_log
from numapin.doctor.model import compare, counts_of, parse_counts
from numapin.system import nccl_files, numa
