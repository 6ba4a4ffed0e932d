"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.cli.top import _follow
from numapin.data.usage import SCHEMA
from numapin.launcher import run_folder
from numapin.launcher.run_folder import find_file
from numapin.observe import during_run, model, node, read
from numapin.observe import find as find_job
from numapin.observe.find import RunningJob
from numapin.observe.model import MemoryKind, Observed, Role
from numapin.observe.node import read_swapped
from numapin.observe.read import observe
from numapin.observe.top import LoopPace, LoopPaces, Sample, Top, top
from numapin.observe.verify import VerifyReport, verify
from numapin.rank import handover
from numapin.system import proc
from numapin.system.proc import children_of, environment_of, parent_of, start_time
from numapin.view.top_table import top_table
from numapin.view.verify_table import summary, verify_table
