"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.system import calls, cuda, memory, migrate, numa, oom, placement, proc, whole_process
from numapin.system.cgroup import own_cgroups
from numapin.system.cuda import CudaRefused, Driver
from numapin.system.migrate import Stay, move_pages
from numapin.system.nccl import ignores_affinity, mapped_library, narrows
from numapin.system.nccl_files import installed_library, library_version
from numapin.system.placement import Ledger, Placement, find_pages, place, read_numa_maps
from numapin.system.proc import descendants, state_of, waits_forever
from numapin.system.tree import Tree
