"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.sharing import sealed

__all__ = ["CpuSet", "sealed"]
