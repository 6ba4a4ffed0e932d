"""Marks that skip a test where something it needs is missing, and the version of the installed torch."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec

import pytest

try:
    TORCH_VERSION = tuple(map(int, metadata.version("torch").split(".")[:2]))
except metadata.PackageNotFoundError:
    TORCH_VERSION = (0, 0)
"""The version of the installed torch, such as (2, 13); (0, 0) without one."""

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="fewer than two CPUs may be used here")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="no accelerate; type: pip install .[dev]")
