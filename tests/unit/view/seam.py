"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.attach.report import Attached, AttachedRank, BoundProcess, ProcessPages
from numapin.base.cpu_set import CpuSet
from numapin.base.printable import printable
from numapin.launcher.failure import JobFailure
from numapin.topology.examples import read_example
from numapin.topology.model import NicKind, NodeKind
from numapin.topology.nics import adapters, natural
from numapin.topology.readings import GpuLoad
from numapin.view.attach_table import attach_table
from numapin.view.failure_block import failure_text, traceback_lines
from numapin.view.openmetrics import ended, openmetrics
from numapin.view.picture.boxes import PAD, Box, BoxKind, Ink, Label, flow, frame
from numapin.view.picture.layout import lay_out
from numapin.view.picture.nodes import NARROW, WIDE
from numapin.view.picture.page import page
from numapin.view.picture.style import COLORS, NUM_LOOKS, PATTERN_INK, RANK_COLORS, color_of, look_of, pattern_of
from numapin.view.picture.svg import element, svg
from numapin.view.picture.text import fit, width_of, wrapped
from numapin.view.plan_table import explained_plan
from numapin.view.structure import spanning_l3s
from numapin.view.topo_matrix import topo_matrix
from numapin.view.topo_tree import topo_tree
from numapin.view.words import policy
