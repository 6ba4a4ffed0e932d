"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.attach import bind, targets
from numapin.attach.report import undo_commands
from numapin.attach.targets import Aim, AttachOptions, Target, examine
from numapin.base.cpu_set import CpuSet
from numapin.observe.find import RunningJob, gpu_of, gpus_of_ranks
from numapin.system import proc
from numapin.system import threads as affinity
from numapin.system.proc import Gone
from numapin.system.tree import Tree
