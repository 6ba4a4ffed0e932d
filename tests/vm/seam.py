"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.data.pinning import reclaimer
from numapin.system import cuda, numa, proc
from numapin.system.memory import address_of
