"""Roles: the cores of DataLoader workers, CPU optimizers and main threads, on captured machines and on made-up ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.base.cpu_set import CpuSet
from numapin.errors import PlanError, UsageError
from numapin.plan.make import make_plan
from numapin.plan.model import Plan, RankPlan, RoleCpus
from numapin.plan.request import Bind, CoresFor, Request, parse_cores_for
from numapin.plan.roles import with_users_openmp
from tests.machines.grids import grid
from tests.machines.roots import MACHINES, topology_of

if TYPE_CHECKING:
    from numapin.topology.model import Topology
