"""Marks of tests that some machines cannot run; the reason of the skip names what is missing.

Input: this process's CPUs and user. Output: marks.
"""

from __future__ import annotations

import os

import pytest

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="fewer than two CPUs may be used here")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
