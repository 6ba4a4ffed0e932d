"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.cli.entry import read_line
from numapin.launcher.options import parse
from numapin.plan.gpus import settle_gpus
from numapin.plan.model import GpuRef
from numapin.tasks import hosts
from numapin.tasks.hosts import JOB_IDS, OwnHost, expand_hostlist, find_hosts, job_ids_of, with_found_hosts
from numapin.tasks.identify import _COMMANDS, LAUNCHERS, Task, explain_repeated, find_task, repeated_task
from numapin.tasks.slice import Slice, has_own_cpus, inside, plan_task, slice_of
