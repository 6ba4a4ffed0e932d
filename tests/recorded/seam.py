"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.cli.main import numapin
from numapin.launcher.failure import ElsewhereFirst, EndedRank, JobFailure
from numapin.view.failure_block import failure_block
