"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.base.records import read_record
from numapin.data import message, opening, packing, path, pinning, pool, queues
from numapin.data import usage as usage_log
from numapin.data.balance import Balance
from numapin.data.budget import LockRoom, read_room
from numapin.data.casting import casts_of
from numapin.data.forking import keep_in_children
from numapin.data.handover import HandedDown, Handover
from numapin.data.iterator import _end_at_exit as end_at_exit
from numapin.data.locality import Locality, find_locality
from numapin.data.message import DTYPES, NO_GRANT, NO_SLOT, Grant, Head, Miss, Report, decode, encode_plain, unpack
from numapin.data.message import encode as message_encode
from numapin.data.opening import Copier, Lender, _Copy, copied, small_runs
from numapin.data.packing import LARGE_BYTES, BatchMemory, Packer, WorkerSlots
from numapin.data.path import DataPath, PathOptions
from numapin.data.pinning import Reclaimer, Settler, Settling, reclaimer
from numapin.data.pool import Pool, unused_slots_hidden
from numapin.data.quarantine import Quarantine, capture_lock, is_capturing, watch_captures
from numapin.data.queues import Channel, ResultQueue, TaskQueue
from numapin.data.slots import FreeSlots, RecentSizes, Slot, capacity_for, map_memfd
from numapin.data.stats import Counts, Stats, share_on
from numapin.data.transform import put_on, tensors_in
from numapin.data.usage import SCHEMA, JobUsage, LoaderUsage, Shortfall
from numapin.data.worker import Stacker, limit_libraries, num_worker_threads
from numapin.observe.during_run import read_loaders
from numapin.rank import handover
from numapin.rank.become import BINDING
from numapin.system import calls, cuda, memory
from numapin.system import pages as placement
from numapin.system import thread_limits as threads
from numapin.system.cuda import CudaRefused, Driver
from numapin.system.pages import PINNED, Placement
from numapin.system.tree import Tree
from numapin.topology import discover
