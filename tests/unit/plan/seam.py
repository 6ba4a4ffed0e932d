"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.plan.gpus import settle_gpus
from numapin.plan.nics import exported, nic_variables, with_users_nics
from numapin.plan.request import parse_gpus, parse_memory, parse_nic_env
from numapin.rank import bind
from numapin.rank.handover import RankSlice, slice_text
from numapin.system import numa
from numapin.tasks.identify import Task
from numapin.tasks.slice import plan_task
from numapin.topology.model import CpuSpeed, Mig, NodeKind
from numapin.topology.nics import NicKind
