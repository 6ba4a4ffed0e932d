"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.observe.model import Policy
from numapin.observe.top import Top, TopRank
from numapin.plan.model import GpuRef
from numapin.steps.totals import Waited
from numapin.topology.readings import GpuLoad
from numapin.topology.vendors import hiding_variables
