"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.attach.report import Attached, AttachedRank, BoundProcess, ProcessPages
from numapin.base.cpu_set import CpuSet
from numapin.base.text import printable
from numapin.launcher.failure import JobFailure
from numapin.observe.node import JobOrigin
from numapin.topology.discover import example_names, read_example
from numapin.topology.model import Pcie
from numapin.topology.nics import NicKind, adapters, natural
from numapin.topology.readings import GpuLoad
from numapin.view import picture as drawing
from numapin.view.attach_table import attach_table
from numapin.view.failure_block import failure_text, traceback_lines
from numapin.view.openmetrics import ended, openmetrics
from numapin.view.page import page
from numapin.view.picture import Box, BoxKind, lay_out, svg
from numapin.view.plan_table import explained_plan
from numapin.view.topo_matrix import topo_matrix
from numapin.view.topo_tree import topo_tree
