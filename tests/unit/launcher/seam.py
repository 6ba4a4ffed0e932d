"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin import launch
from numapin.cli.run import OPTIONS
from numapin.cli.torchrun_command import TorchrunCommand
from numapin.launcher import hosts, ranks, run_folder, store, store_server
from numapin.launcher.connection import Connection, PeerRefused
from numapin.launcher.failure import EndedRank, JobFailure, RanksFailed, in_order, likely_cause
from numapin.launcher.hosts import HostPlace, Hosts, NotMet, SeveralHosts, why_known
from numapin.launcher.logs import Logs, RankOutput
from numapin.launcher.options import TORCHRUN_OPTIONS, Job, parse
from numapin.launcher.ranks import Alarm, StartedRank, StopSignal, notes_of
from numapin.launcher.rehearse import require_gpus
from numapin.launcher.store import MAGIC, RankStore, StoreClient, StoreRefusal
from numapin.launcher.store_server import LOOPBACK, listen, serving, torch_folder, why_not_served
from numapin.launcher.survivors import LastLook
from numapin.plan.model import GpuRef
from numapin.rank import handover
from numapin.rank.signals import Mailbox
from numapin.system import proc
from numapin.system.peers import LocalPeers
from numapin.topology.model import Pcie
from numapin.topology.readings import NvmlReading, NvmlReadings
