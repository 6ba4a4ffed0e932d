"""Workers as serving and RL frameworks start them, in the ways in which these bound them wrongly or not at all.

    numapin exec --children -- python serving_probe.py [CASE…]

The worker of each case takes the GPU on node 1, and writes the kernel's view of itself to $PROBE_OUT/CASE.json.
`torch` is the stand-in.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tests.vm.children_probe import OUT, write

MPOL_BIND: Final = 2
CLEARS: Final = "TLLM_NUMA_AWARE_WORKER_AFFINITY"


def main(*names: str) -> None:
    """Start the worker of each case, one after the other."""
    for name in names or CASES:
        environ = {**os.environ, **GIVEN.get(name, {})}
        command = [sys.executable, __file__, "worker", name]
        # A worker of Ray is started by a daemon, not by multiprocessing: no wrapper of its executable reaches it.
        subprocess.run(command, env=environ, check=True, start_new_session=name.startswith("ray"))


def _ray_list(name: str) -> None:
    """Get the list of devices while the process runs, as in a Ray actor: it has one entry, whatever the rank."""
    os.environ.update(CUDA_VISIBLE_DEVICES="1", LOCAL_RANK="0")
    import torch

    write(name, torch_threads=torch.get_num_threads())


def _set_device(name: str, number: int = 1) -> None:
    """Set the device; it is the only thing that names the GPU."""
    import torch

    torch.cuda.set_device(number)
    write(name, torch_threads=torch.get_num_threads())


def _on_node_0(name: str) -> None:
    """Be bound to node 0 by the launcher, as all its ranks."""
    os.sched_setaffinity(0, range(4))
    nodes = ctypes.c_ulong(1)
    assert ctypes.CDLL("libnuma.so.1").set_mempolicy(MPOL_BIND, ctypes.byref(nodes), ctypes.c_ulong(64)) == 0
    _set_device(name)


def _clears(name: str) -> None:
    """Remove any binding that is not its own, unless the variable says otherwise."""
    import torch

    torch.cuda.set_device(1)
    if CLEARS not in os.environ:
        os.sched_setaffinity(0, range(8))
    write(name)


def _clears_always(name: str) -> None:
    """Remove the binding, and look at itself with `numapin verify`, which names it."""
    from tests.vm.agent import verify

    os.environ.pop(CLEARS)
    _clears(name)
    verify(OUT / "verify.json")


CASES: Final[dict[str, Callable[[str], Any]]] = {
    "ray-list": _ray_list,
    "ray-full-list": _set_device,
    "ray-unbound": _set_device,
    "reordered": partial(_set_device, number=0),
    "all-on-node-0": _on_node_0,
    "clears": _clears,
    "clears-always": _clears_always,
}
GIVEN: Final = {
    "ray-full-list": {"CUDA_VISIBLE_DEVICES": "0,1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
    "reordered": {"CUDA_VISIBLE_DEVICES": "1,0"},
    "ray-unbound": {"PATH": "/nonexistent"},
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        CASES[sys.argv[2]](sys.argv[2])
    else:
        main(*sys.argv[1:])
