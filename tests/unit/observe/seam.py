"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.cli.top import _follow
from numapin.data.usage import SCHEMA
from numapin.launcher import run_folder
from numapin.launcher.run_folder import find_file
from numapin.observe import during_run, node, read
from numapin.observe import find as find_job
from numapin.observe.during_run import read_loaders, reporting_loaders
from numapin.observe.find import RunningJob, read_run
from numapin.observe.model import MemoryKind, NcclLibrary, Observed, ObservedRank, Pages, Policy, Process, Role, Thread
from numapin.observe.node import NodeFollower, Sampler, origin_of, read_swapped, running_folders
from numapin.observe.read import observe
from numapin.observe.top import LoopPace, LoopPaces, Sample, Top, top
from numapin.observe.verify import VerifyReport, verify
from numapin.plan.model import GpuRef
from numapin.rank import handover
from numapin.steps.totals import Waited
from numapin.system import proc
from numapin.system.proc import children_of, environment_of, parent_of, start_time
from numapin.topology.readings import GpuLoad
from numapin.view.top_table import top_table
from numapin.view.verify_table import summary, verify_table
