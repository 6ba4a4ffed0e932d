"""A training script that only loads, and writes the kernel's view of its batches to $PROBE_OUT/0.json.

    numapin run loader_probe.py rank
    python -m tests.vm.loader_probe SCENARIO

Of each loader it writes the nodes of its pages (move_pages and numa_maps), the CPUs and memory policy of its workers
(/proc/<pid>), and its own `stats()`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.utils.data

import numapin
from numapin.errors import BindingRefused
from tests.vm import probe
from tests.vm.seam import numa
from tests.waiting import wait_until

MIB: Final = 1 << 20
ROWS: Final = 32
NUM_WORKERS: Final = 2
NODE: Final = 1  # that of GPU 1; not the one that a process probably starts on
LEFT_FREE_MIB: Final = 16
SLOT: Final = "memfd:numapin-slot"
SETTLES_IN_S: Final = 600.0  # until the kernel was asked about a slot; on the emulated machine everything is slow


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows filled with their own number, as int32; ROWS rows have `batch_mib` MiB."""

    def __init__(self, num_batches: int, batch_mib: int) -> None:
        self.num_batches, self.row_length = num_batches, batch_mib * MIB // ROWS // 4

    def __len__(self) -> int:
        return ROWS * self.num_batches

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.row_length,), index, dtype=torch.int32)


@dataclass(slots=True)
class Seen:
    """The observations of one running loader. Pages by node are summed over batches in slots."""

    num_batches: int = 0
    num_in_slots: int = 0
    slot_pages: dict[str, int] = field(default_factory=dict)
    slot_bytes: int = 0
    slot_mapping: dict[str, object] | None = None
    workers: list[dict[str, object]] = field(default_factory=list)
    rank_threads: list[str] = field(default_factory=list)
    rank_cpus: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


def load(
    loader: numapin.DataLoader[torch.Tensor], *, in_slots: int | None = None, kept: list[Any] | None = None
) -> Seen:
    """Ask the kernel about each batch, until `in_slots` batches were in slots; append batches to `kept`."""
    seen = Seen(rank_cpus=[_cpus("self")])
    for number, batch in enumerate(loader):
        rows = torch.arange(number * ROWS, number * ROWS + ROWS, dtype=torch.int32)
        assert (batch == rows[:, None]).all(), "not the batch that is due"  # reads and thereby maps every page
        _note(seen, batch)
        if kept is not None:
            kept.append(batch)
        if in_slots is not None and seen.num_in_slots >= in_slots:
            seen.workers = [_worker(child.pid) for child in multiprocessing.active_children()]
            seen.rank_threads = sorted({thread["cpus"] for thread in probe._threads()})
            wait_until(lambda: loader.stats().share_on_node is not None, limit_s=SETTLES_IN_S)
            break
    assert all(batch[0, 0] == number * ROWS for number, batch in enumerate(kept or [])), "a batch was overwritten"
    seen.rank_cpus.append(_cpus("self"))
    seen.stats = asdict(loader.stats())
    return seen


def _note(seen: Seen, batch: torch.Tensor) -> None:
    """Count a batch's pages by node while it is on loan, if it is in a slot."""
    seen.num_batches += 1
    start, end, words = probe.mapped_at(batch.data_ptr())
    if not any(SLOT in word for word in words):
        return
    seen.num_in_slots += 1
    with suppress(OSError):  # move_pages is refused
        pages = numa.nodes_of_range(batch.data_ptr(), batch.nbytes)
        seen.slot_pages |= Counter(seen.slot_pages) + Counter({str(node): num for node, num in pages.items()})
    seen.slot_bytes = end - start
    seen.slot_mapping = probe._numa_maps(f"{start:x}")


def _worker(pid: int | None) -> dict[str, object]:
    """Return the CPUs of all threads of a process, and the policies of its memory outside the slots."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    return {
        "cpus": sorted({_cpus(f"{pid}/task/{task.name}") for task in tasks}),
        "policies": sorted({line.split()[1] for line in lines if SLOT not in line}),
    }


def _cpus(process: str) -> str:
    found = re.search(r"Cpus_allowed_list:\t(.*)", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return found[1]


def _loader(
    node: int | None = NODE, *, batch_mib: int = 2, num_batches: int = 500, **options: Any
) -> numapin.DataLoader[torch.Tensor]:
    rows = Rows(num_batches, batch_mib)
    return numapin.DataLoader(rows, batch_size=ROWS, num_workers=NUM_WORKERS, node=node, **options)


def rank() -> dict[str, object]:
    """Let torch start its threads, and load on the node that `numapin run` has planned."""
    torch.ones(512, 512).mm(torch.ones(512, 512))
    cpus = [thread["cpus"] for thread in probe._threads()]
    used = {"num_threads": torch.get_num_threads(), "cpus": cpus}
    torch.set_num_threads(1)
    return {"torch": used, **placement(node=None)}


def placement(node: int | None = NODE) -> dict[str, object]:
    """Load, and bind a thread in the same way as torch's pin thread."""
    loader = _loader(node)
    seen = load(loader, in_slots=10)
    pin_thread: dict[str, object] = {}

    def work() -> None:
        loader._numapin_path.bind_this_thread()
        pin_thread.update(cpus=_cpus("thread-self"), policy=probe._policy())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    pin_thread.update(rank_cpus=_cpus("self"), rank_policy=probe._policy())
    return {"numapin": asdict(seen), "pin_thread": pin_thread}


def refused() -> dict[str, object]:
    """Load under refused memory policies: by default, strictly, and without numa_maps, the last source of locations."""
    polite = load(_loader(), in_slots=10)
    try:
        load(_loader(strict=True))
        error = None
    except BindingRefused as caught:
        error = {"message": caught.message, "hint": caught.hint}
    subprocess.run(["mount", "--bind", "/dev/null", f"/proc/{os.getpid()}/numa_maps"], check=True)
    blind = _loader()
    for _ in blind:
        if any("unverified" in note for note in blind.stats().notes):
            break
    return {"polite": asdict(polite), "strict": error, "blind": asdict(blind.stats())}


def full() -> dict[str, object]:
    """Load on a node with almost no free memory."""
    # Most of the node's memory goes offline, in a tenth of the time that touching it would take.
    folder = Path(f"/sys/devices/system/node/node{NODE}")
    for block in folder.glob("memory*/state"):
        with suppress(OSError):  # the kernel's own memory cannot go offline
            block.write_text("offline")
    free = re.search(r"MemFree:\s+(\d+) kB", (folder / "meminfo").read_text())
    assert free is not None
    num_huge_pages = max(0, int(free[1]) // 1024 - LEFT_FREE_MIB) // 2
    (folder / "hugepages/hugepages-2048kB/nr_hugepages").write_text(str(num_huge_pages))
    return asdict(load(_loader(batch_mib=8, num_batches=100), in_slots=10))


def shm() -> dict[str, object]:
    torchs: Any = iter(torch.utils.data.DataLoader(Rows(6, 38), batch_size=ROWS, num_workers=NUM_WORKERS))
    error = None
    try:
        list(torchs)
    except RuntimeError as caught:
        error = str(caught).splitlines()[-1]
    torchs._shutdown_workers()
    return {"torch": error, "numapin": asdict(load(_loader(batch_mib=38, num_batches=8), kept=[]))}


def limited() -> dict[str, object]:
    group = Path("/sys/fs/cgroup/loader-limited")
    (group.parent / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    (group / "memory.max").write_text(str(256 * MIB))
    (group / "cgroup.procs").write_text("0")
    return asdict(load(_loader(batch_mib=12, num_batches=30)))


SCENARIOS: Final[dict[str, Callable[[], dict[str, object]]]] = {
    scenario.__name__: scenario for scenario in (rank, placement, refused, full, shm, limited)
}


def main() -> None:
    (scenario,) = sys.argv[1:]
    if scenario != "rank":
        torch.set_num_threads(1)  # spinning threads are expensive when two CPUs emulate eight
    Path(os.environ["PROBE_OUT"], "0.json").write_text(json.dumps(SCENARIOS[scenario](), indent=1))


if __name__ == "__main__":
    main()
