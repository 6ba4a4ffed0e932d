"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.data.handover import HandedDown
from numapin.data.locality import Locality
from numapin.data.message import NO_SLOT, Head, Parcel, decode
from numapin.data.opening import Copier, Lender
from numapin.data.packing import Packer, WorkerSlots
from numapin.data.pool import Pool, PoolSpec
from numapin.data.slots import Slot
from numapin.system import cuda
