"""Ranks that hold a GPU and end abnormally give its memory back. Also signals, and `numapin.spawn` on GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import numapin
from numapin.errors import RankError
from tests.integration.faulty import LIMIT_S, Job, handles
from tests.integration.test_gpu import UUIDS, needs_gpu
from tests.waiting import wait_until

pytestmark = needs_gpu
each_number = pytest.mark.parametrize(
    "num_ranks",
    [
        1,
        *(
            pytest.param(
                number,
                marks=[pytest.mark.multigpu, pytest.mark.skipif(len(UUIDS) < number, reason="fewer NVIDIA GPUs")],
            )
            for number in (2, 4)
        ),
    ],
)

# Takes most of the GPU, so a restarted rank fails if the memory of the previous one is still taken.
HOLDS = """
import torch, numapin
class Filled(torch.utils.data.Dataset):
    def __len__(self): return 1 << 30
    def __getitem__(self, i): return torch.full((1 << 18,), i)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
batches = iter(numapin.DataLoader(Filled(), 4, num_workers=2, device="cuda"))
for _ in range(8): next(batches)
held = torch.empty(int(torch.cuda.get_device_properties(0).total_memory * 0.7), dtype=torch.uint8, device="cuda")
held.fill_(1)
torch.cuda.synchronize()
mark("holds")
"""


def used_mib() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).split()]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while Job.started:
        Job.started.pop().clean()


@pytest.fixture
def before() -> list[int]:
    return used_mib()


def are_free(before: list[int]) -> bool:
    """Wait until the GPUs have no more memory in use than before; return whether that came true."""
    return wait_until(lambda: all(now <= then + 64 for now, then in zip(used_mib(), before, strict=True)), limit_s=20)


def assert_given_back(job: Job, before: list[int]) -> None:
    assert job.leftovers().startswith("no process left"), job.err
    assert are_free(before)


def start(folder: Path, num_ranks: int, *options: str, then: str) -> Job:
    """Start a job whose ranks hold most of their GPUs, and wait until they do."""
    command = ["--nproc-per-node", str(num_ranks), *options]
    job = Job(folder, command, HOLDS + then, CUDA_VISIBLE_DEVICES=",".join(UUIDS))
    job.await_marks("holds", num_ranks)
    return job


@pytest.mark.alone
@each_number
class TestMemoryComesBack:
    """GPU memory after a rank or the launcher is killed."""

    def test_of_a_rank_that_starts_again(self, tmp_path: Path, num_ranks: int, before: list[int]) -> None:
        """A rank is killed; when all ranks are restarted, they find their GPUs empty."""
        job = start(tmp_path, num_ranks, "--max-restarts", "1", then="restart or time.sleep(300)\n")
        assert min(used_mib()[:num_ranks]) > 40_000  # otherwise nothing is held, and the test could not fail
        os.kill(job.marked("holds")[0][2], signal.SIGKILL)
        assert job.wait() == 0, job.err
        assert len(job.marked("holds", restart=1)) == num_ranks
        assert_given_back(job, before)

    def test_of_the_launcher(self, tmp_path: Path, num_ranks: int, before: list[int]) -> None:
        """The launcher is killed, and the ranks' memory is freed."""
        job = start(tmp_path, num_ranks, then="time.sleep(300)\n")
        job.process.kill()
        assert job.wait() == -signal.SIGKILL
        assert_given_back(job, before)

    def test_of_ranks_that_hang_on_the_gpu(self, tmp_path: Path, num_ranks: int, before: list[int]) -> None:
        """Ranks that ignore SIGTERM in a long kernel are killed, and their memory is freed."""
        job = start(
            tmp_path,
            num_ranks,
            *("--shutdown-timeout", "1"),
            then="signal.signal(signal.SIGTERM, signal.SIG_IGN); torch.cuda._sleep(1 << 40); mark('hangs')\n"
            "torch.cuda.synchronize()\n",
        )
        job.await_marks("hangs", num_ranks)
        job.process.terminate()
        assert job.wait() == 128 + signal.SIGTERM, job.err
        assert_given_back(job, before)


@each_number
def test_signals_while_the_gpu_computes(tmp_path: Path, num_ranks: int) -> None:
    """SIGUSR1 to the launcher reaches each rank between its steps, and the saved data of its GPU is complete."""
    then = (
        "told = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: told.append(1)); mark('ready')\n"
        "steps, state = 0, torch.zeros(1 << 20, device='cuda')\n"
        "while not told: state += 1; steps += 1; torch.cuda.synchronize(); batch = next(batches)\n"
        "torch.save(state.cpu(), f'{folder}/saved.{rank}')\n"
        "sys.exit(not (state == steps).all().item())\n"
    )
    job = start(tmp_path, num_ranks, then=then)
    job.await_marks("ready", num_ranks)
    assert wait_until(lambda: all(handles(pid, signal.SIGUSR1) for *_, pid in job.marked("ready")), limit_s=LIMIT_S)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 0, job.err
    assert len(list(job.marks.glob("saved.*"))) == num_ranks


def reduced(fails: int = -1) -> tuple[float, str, str]:
    """Sum the ranks over NCCL; return the sum, its GPU, and the planned GPU. One rank may fail afterwards."""
    import json

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    tensor = torch.ones(1 << 20, device=device) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    if dist.get_rank() == fails:
        _fail()
    if fails >= 0:
        dist.all_reduce(tensor)  # never arrives
        torch.cuda.synchronize()
    total = tensor.mean().item()
    dist.destroy_process_group()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return total, uuid, json.loads(os.environ["NUMAPIN_BINDING"])["gpu"]["uuid"]


def _fail() -> NoReturn:
    message = "after the first collective"
    raise LookupError(message)


@each_number
class TestSpawn:
    """`numapin.spawn` with NCCL."""

    def test_each_rank_has_its_gpu(self, num_ranks: int) -> None:
        """The sum over all ranks is correct, on the planned GPUs."""
        expected = num_ranks * (num_ranks + 1) / 2
        done = numapin.spawn(reduced, num_ranks=num_ranks, timeout=120)
        assert done == tuple((expected, uuid, uuid) for uuid in UUIDS[:num_ranks])

    def test_the_first_error_is_raised(self, num_ranks: int, before: list[int]) -> None:
        """If one rank raises while others wait in a collective, its traceback is raised soon, and the GPUs are free."""
        begin = time.monotonic()
        with pytest.raises(RankError, match="after the first collective"):
            numapin.spawn(reduced, (num_ranks - 1,), num_ranks=num_ranks, timeout=120, shutdown_timeout=2)
        assert time.monotonic() - begin < 60
        assert are_free(before)
