"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.launcher import rehearse as launcher_rehearse
from numapin.plan.nics import exported
from numapin.plan.request import NicLibrary
from numapin.rank import bind, handover, hook_env, shim, signals
from numapin.rank.hook_env import HOOK
from numapin.system import numa
