"""Functions for ranks of `numapin.spawn`. They must be importable, like a user's functions."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

VARIABLES = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "OMP_NUM_THREADS", "NUMAPIN_BINDING"),
)


class Told:
    """An argument that is unpickled as the CPUs of the unpickling process."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.sched_getaffinity, (0,)


class Unloadable:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def cpus_when_unpickled(cpus: frozenset[int]) -> tuple[set[int], set[int], bool]:
    """Return the CPUs at unpickling, the CPUs now, and whether torch was imported for the unpickling."""
    return set(cpus), set(os.sched_getaffinity(0)), "torch" in sys.modules


def echo(*values: object) -> tuple[object, ...]:
    return values


def fail_in(rank: str, folder: str) -> None:
    """Raise in one rank once the other has left its number; the other then waits to be terminated."""
    if os.environ["RANK"] == rank:
        _wait_for(Path(folder), 1)
        msg = "the root cause"
        raise LookupError(msg)
    wait_in(folder)


def die_in_front_of_peer(folder: str) -> None:
    """Die of SIGKILL in rank 0; rank 1 waits for it on a socket, as in a collective, and raises what it sees."""
    path = Path(folder) / "peer"
    with socket.socket(socket.AF_UNIX) as here:
        if os.environ["RANK"] == "0":
            here.bind(f"{path}.new")
            here.listen()
            Path(f"{path}.new").rename(path)
            with here.accept()[0]:  # closed by the death of rank 0, not earlier
                os.kill(os.getpid(), signal.SIGKILL)
        _wait_for(Path(folder), 1, "peer")
        here.connect(str(path))
        if not here.recv(1):
            raise ConnectionError


def die_in_answer(folder: str) -> bytes:
    """Die while sending a large answer over a socket that a forked child holds open, which ignores SIGTERM."""
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (Path(folder) / str(os.getpid())).touch()
        while "sock" not in Path(f"/proc/{parent}/wchan").read_text():
            time.sleep(0.01)
        os.kill(parent, signal.SIGKILL)
        time.sleep(60)
    return b"x" * (64 << 20)


def wait_in(folder: str) -> None:
    """Leave this process's number in a folder and wait to be terminated."""
    path = Path(folder) / str(os.getpid())
    path.touch()
    time.sleep(300)


def meet(*ports: int) -> tuple[set[tuple[str, str]], list[float]]:
    """Meet on MASTER_PORT, then on two ports of one's own, and in a store that names the caller's.

    Functions that were written for torch.multiprocessing.spawn do so. Return the listeners on MASTER_PORT while the
    first process group exists, and the number of ranks each time, as a sum.
    """
    import torch
    import torch.distributed as dist

    rank, world_size, limit = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=60)
    store: Any = dist.TCPStore(  # type: ignore[attr-defined] # public, but not exported
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0, timeout=limit
    )
    master_port = int(os.environ["MASTER_PORT"])
    own: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": limit}
    places: list[dict[str, Any]] = [
        {},
        own,
        {"init_method": f"tcp://127.0.0.1:{ports[1]}", **own},
        {"store": store, **own},
    ]
    found, numbers = set[tuple[str, str]](), []
    for place in places:
        dist.init_process_group("gloo", **place)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.barrier()
        found = found or listeners(master_port)
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(ports[0]))
        numbers.append(tensor.item())
    return found, numbers


def meet_at(port: int) -> float:
    """Choose a place of one's own before torch is imported, meet there, and return the number of ranks, as a sum."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def listeners(port: int) -> set[tuple[str, str]]:
    """Return the family and the address, as the kernel writes it, of each socket that listens on a port."""
    rows = [
        (family, *line.split()[1:4:2])
        for family in ("tcp", "tcp6")
        for line in Path("/proc/net", family).read_text().splitlines()[1:]
    ]
    return {(family, at[:-5]) for family, at, state in rows if state == "0A" and int(at[-4:], 16) == port}


def raise_port() -> NoReturn:
    raise LookupError(os.environ["MASTER_PORT"])


def _wait_for(folder: Path, count: int, pattern: str = "*") -> None:
    while len(list(folder.glob(pattern))) < count:
        time.sleep(0.02)
