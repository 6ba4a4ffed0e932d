"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.attach import bind as pages
from numapin.attach import targets
from numapin.attach.bind import Binder, ProcessMemory, Region, attach, move
from numapin.attach.report import undo_commands
from numapin.attach.targets import (
    Aim,
    AttachOptions,
    Target,
    aim_at_processes,
    aim_at_run,
    cpus_of_cpuset,
    examine,
    other_processes,
    shortfalls_of,
    why_untouchable,
)
from numapin.base.cpu_set import CpuSet
from numapin.launcher import run_folder
from numapin.observe.find import RunningJob, gpu_of, gpus_of_ranks
from numapin.rank import handover
from numapin.system import proc
from numapin.system import threads as affinity
from numapin.system.proc import Gone
from numapin.system.threads import ThreadId, cpus_of, set_cpus, threads_of
from numapin.system.tree import Tree
