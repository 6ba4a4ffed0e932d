"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.files import write_text_to
from numapin.base.records import read_record, to_json
from numapin.base.text import printable
from numapin.bench import process
from numapin.bench.loader import CASES
from numapin.cli import verify
from numapin.cli.entry import main
from numapin.cli.main import numapin
from numapin.cli.run import _loaders_reported
from numapin.compare.campaign import JobOptions, JobResult, run_job
from numapin.compare.variants import own_command
from numapin.launcher import run_folder
from numapin.launcher.options import TORCHRUN_OPTIONS
from numapin.launcher.ranks import ended_on_error, guarded
from numapin.launcher.run_folder import run_directory
from numapin.observe import node
from numapin.observe.node import NodeFollower, running_folders
from numapin.rank import handover, hook_env
from numapin.rank.handover import write_json
from numapin.rank.hook_env import steps_environment
from numapin.rank.shim import CODE
from numapin.spawning import call as spawn_call
from numapin.spawning.call import RankProcess, results_of
from numapin.spawning.child import NUM_SIZE_BYTES, Answer, Outcome
from numapin.steps.job import MOST_BYTES, NO_STEP, RankFiles, RunOutput
from numapin.steps.meter import find_place
from numapin.steps.record import SCHEMA, Phase, RankSteps, StepSettings, StepUnit
from numapin.system import proc
from numapin.system.cuda import CudaRefused, Driver
from numapin.system.libraries import FORKS_ISSUE, forks_may_hang
from numapin.system.pages import PINNED
from numapin.system.proc import state_of, thread_cpus
from numapin.tasks.hosts import HOST_FILES
from numapin.topology.discover import example_names
from numapin.topology.nics import NicKind
from numapin.topology.vendors import hiding_variables
from numapin.trace.reading import read_trace

if TYPE_CHECKING:
    from numapin.data.slots import Slot
