"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.cli.main import numapin
from numapin.doctor.check import CHECKS
from numapin.launcher.failure import EndedRank, JobFailure
from numapin.launcher.fixed_hosts import HostFailure
from numapin.view.failure_block import failure_block
