"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.cli.main import numapin
from numapin.launcher import run_folder
from numapin.observe.find import _Record
from numapin.tasks.enter import _own_binding, find_slice
from numapin.tasks.identify import find_task
from numapin.topology.discover import read_example
from numapin.topology.nics import NicKind

if TYPE_CHECKING:
    from numapin.view.picture import Box, BoxKind, Picture
