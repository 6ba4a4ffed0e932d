"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.data.handover import HandedDown
from numapin.data.locality import Locality
from numapin.data.message import NO_SLOT, Head, Parcel, decode
from numapin.data.opening import Copier, Lender
from numapin.data.packing import Packer, WorkerSlots
from numapin.data.pool import Pool, PoolSpec
from numapin.system import cuda

if TYPE_CHECKING:
    from numapin.data.handover import Handover
    from numapin.data.queues import Channel
