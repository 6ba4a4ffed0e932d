"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.system import calls, cgroup, cuda, memory, numa, numa_maps, pages, proc, threads
from numapin.system.cgroup import own_cgroups
from numapin.system.cuda import CudaRefused, Driver
from numapin.system.libraries import ignores_affinity, mapped_library, narrows
from numapin.system.nccl_files import installed_library, library_version
from numapin.system.pages import Ledger, Moved, Stay, find_pages, move_pages, place, read_numa_maps
from numapin.system.proc import descendants, state_of, waits_forever
from numapin.system.tree import Tree
