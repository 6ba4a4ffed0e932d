"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.cli.main import numapin
from numapin.launcher.failure import EndedRank, JobFailure
from numapin.plan.make import plan_and_rank_warnings
from numapin.topology.model import Mig
from numapin.topology.vendors import GpuVendor, first_visible, seen_by_ranks, support_of
from numapin.view.failure_block import failure_block
