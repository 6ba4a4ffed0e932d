"""One process with two GPUs on two nodes: its threads take, free and reuse pinned memory, and the kernel is asked.

    python -m tests.vm.pinned_probe

Each GPU has a thread on the CPUs of its node. A third thread works for GPU 1 on the CPUs of node 0, as an unbound one
may. $FAKE_CUDA is the stand-in for CUDA's driver; NVML's says where the GPUs are. Writes $PROBE_OUT/seen.json: pages by
node, from move_pages.
"""

from __future__ import annotations

import json
import os
import runpy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch.cuda import _pin_memory_utils

from numapin import pinned
from tests.cuda.fake import installed
from tests.vm.seam import cuda, numa, reclaimer
from tests.waiting import wait_until

MIB: Final = 1 << 20
SIZE: Final = 8 * MIB
CPUS: Final = (range(4), range(4, 8))
BALANCING: Final = Path("/proc/sys/kernel/numa_balancing")  # its pages are hidden from move_pages on Linux 6.1
_PAGE: Final = 4096
_gpu_of = threading.local()
# From its file: its package imports another third of torch, which takes a minute here.
_STAGER: Final = Path(torch.__file__).parent / "distributed/checkpoint/_state_dict_stager.py"
StateDictStager: Final = runpy.run_path(str(_STAGER))["StateDictStager"]


def worker(gpu: int, *, node: int) -> Callable[[Callable[[], Any]], Any]:
    """Start a thread that works for a GPU on the CPUs of a node; return a function that has it call another one."""

    def begin() -> None:
        os.sched_setaffinity(0, CPUS[node])
        _gpu_of.index = gpu

    pool = ThreadPoolExecutor(1, initializer=begin)
    return lambda function: pool.submit(function).result()


def pages(tensor: torch.Tensor) -> dict[str, int]:
    storage = tensor.untyped_storage()
    first, end = -(-storage.data_ptr() // _PAGE), (storage.data_ptr() + storage.nbytes()) // _PAGE
    return {str(node): num for node, num in numa.nodes_of_range(first * _PAGE, (end - first) * _PAGE).items()}


def take(node: int | None = None) -> torch.Tensor:
    return pinned.empty(SIZE, torch.uint8, node=node).fill_(1)


def free(held: list[torch.Tensor]) -> None:
    """Free memory in the calling thread, and wait until it is idle."""
    driver = cuda.driver()
    assert driver is not None
    idle = reclaimer(driver).idle
    before = idle.num_bytes
    held.clear()
    assert wait_until(lambda: idle.num_bytes >= before + SIZE, limit_s=600)


def hand_over(gpu: int, own: Callable[..., Any], other: Callable[..., Any]) -> dict[str, Any]:
    """Let the other GPU's thread free memory of this GPU, and then take memory for its own GPU and for this one."""
    held = [own(take)]
    first, address = pages(held[0]), held[0].data_ptr()
    other(lambda: free(held))
    others = other(take)
    again = other(lambda: take(gpu))
    seen: dict[str, Any] = {"first": first, "others": pages(others), "asked": pages(again)}
    seen["is_same"] = [others.data_ptr() == address, again.data_ptr() == address]
    held = [again]
    del again
    other(lambda: free(held))
    last = own(take)
    other(lambda: last.fill_(2))
    held = [others]
    del others
    own(lambda: free(held))
    return seen | {"last": pages(last), "is_last_same": last.data_ptr() == address}


class Runtime:
    """A stand-in for CUDA's runtime, which counts registrations."""

    num_registered = 0

    def cudaHostRegister(self, _address: int, _num_bytes: int, _flags: int) -> int:  # noqa: N802 - CUDA's name
        self.num_registered += 1
        return 0

    def cudaHostUnregister(self, _address: int) -> int:  # noqa: N802 - CUDA's name
        return 0


def stage() -> dict[str, Any]:
    """Pin memory as checkpoints do, also some that was in use before; check its values, and return its pages."""
    seen: dict[str, Any] = {}
    state, stagers = {"weight": torch.arange(SIZE // 8)}, []
    for is_shared in (True, False):
        stagers.append(StateDictStager(pin_memory=True, share_memory=is_shared))
        staged = stagers[-1].stage(state)
        assert torch.equal(staged["weight"], state["weight"])
        seen["shared" if is_shared else "private"] = pages(staged["weight"])
    used = torch.arange(SIZE // 8)
    _pin_memory_utils.pin_memory(used.data_ptr(), used.nbytes)
    assert torch.equal(used, state["weight"])
    return seen | {"used": pages(used)}


def main() -> None:
    balancing = BALANCING.read_text()
    BALANCING.write_text("0")
    runtime = Runtime()
    untyped: Any = torch.cuda
    untyped.is_available = lambda: True
    untyped.current_device = lambda: _gpu_of.index
    untyped.cudart = lambda: runtime
    torch.set_num_threads(1)
    untyped_tensor: Any = torch.Tensor
    untyped_tensor.is_pinned = lambda _: False
    with installed(Path(os.environ["FAKE_CUDA"])) as driver:
        threads = [worker(gpu, node=gpu) for gpu in (0, 1)]
        far = worker(1, node=0)
        seen: dict[str, Any] = {"without": far(stage)}
        seen["gpu 0"], seen["gpu 1"] = hand_over(0, *threads), hand_over(1, *reversed(threads))
        with pinned.serve_torch():
            # As FSDP2 pins a parameter, then as checkpoints do.
            seen |= {"offload": far(lambda: pages(torch.arange(SIZE // 8).pin_memory())), "staged": far(stage)}
        seen |= {"registered_bytes": driver.registered_bytes(), "num_staged": runtime.num_registered}
    BALANCING.write_text(balancing)  # for the jobs that follow
    Path(os.environ["PROBE_OUT"], "seen.json").write_text(json.dumps(seen, indent=1))
    os._exit(0)  # the threads of the pools do not matter


if __name__ == "__main__":
    main()
