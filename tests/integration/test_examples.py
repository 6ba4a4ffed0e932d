"""The examples: two ranks on the CPU, or on GPUs if available.

On the CPU the ranks are forks of a process that has torch, its compiler and the frameworks imported. They have one
thread each, as that process cannot take over a rank's number: else equal runs would have unequal results.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.integration.forking import CommandLine, Forker
from tests.integration.launching import WITHOUT_COMPILER, Done, environment, numapin, observed, script, start
from tests.integration.test_gpu import UUIDS, needs_gpu
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("examples")]  # so that the frameworks are imported once
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHECKPOINTING = str(EXAMPLES / "train_checkpoint.py")
RUNS = f"{WITHOUT_COMPILER}import runpy\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
TAKEN_OVER = "numapin: torch's DataLoader uses numapin's data path\n"
NEEDS = {
    "train_accelerate.py": "accelerate",
    "train_lightning.py": "pytorch_lightning",
    "train_transformers.py": "transformers",
}
TRAINING = ("train_ddp.py", "train_fsdp.py", "train_accelerate.py", "train_lightning.py", "train_transformers.py")
WRITING = "train_memmap.py"
UNMODIFIED = "train_unmodified.py"
EPOCHS = "12"
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "accelerate", "pytorch_lightning", "transformers.trainer")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

_two_gpus = [pytest.mark.multigpu, pytest.mark.skipif(len(UUIDS) < 2, reason="fewer than two NVIDIA GPUs here")]
on_each_device = pytest.mark.parametrize(
    ("visible", "num_ranks"),
    [
        pytest.param("", 2, id="cpu"),
        pytest.param(",".join(UUIDS[:1]), 1, id="one-gpu", marks=needs_gpu),
        pytest.param(",".join(UUIDS[:2]), 2, id="two-gpus", marks=_two_gpus),
    ],
)


def run(folder: Path, *words: str, visible: str = "", num_ranks: int = 2) -> Done:
    """Run a script, which comes after options, to its end and verify it meanwhile; it must be bound as planned."""
    report = folder / "report.json"
    done = numapin(
        *("run", "--quiet", "--nproc-per-node", str(num_ranks), "--report", str(report), "--verify-after", "0.5"),
        *words,
        cwd=folder,
        CUDA_VISIBLE_DEVICES=visible,
        NUMAPIN_RUN_DIR=str(folder / "runs"),
        **({} if visible else ONE_THREAD),
    )
    assert done.status == 0, done.err
    records = observed(folder / "runs")
    assert len(records) == num_ranks
    assert [record["applied"]["cpus"] for record in records] == [record["requested"]["cpus"] for record in records]
    assert json.loads(report.read_text())["holds"] is True, done.err
    return done


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch [\d.]+: loss ([\d.]+)", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    """Give a process that has torch, its compiler and the frameworks imported."""
    made = Forker(environment(**ONE_THREAD), [name for name in IMPORTED if find_spec(name.partition(".")[0])])
    yield made
    made.close()


def forked(forker: Forker, folder: Path, path: str, *words: str) -> Done:
    """Run a script in two forked ranks."""
    starts = script(folder, forker.client(path), "starts_train.py")
    options = ("run", "--quiet", "--nproc-per-node", "2", starts, *words)
    done = numapin(*options, cwd=folder, CUDA_VISIBLE_DEVICES="", **ONE_THREAD)
    assert done.status == 0, done.err
    return done


@pytest.fixture
def ran(tmp_path: Path, forker: Forker) -> Callable[[str, str, int], Done]:
    """Give a function that runs an example on a device."""

    def done(name: str, visible: str, num_ranks: int) -> Done:
        needed = NEEDS.get(name, "torch")
        if find_spec(needed) is None:
            pytest.skip(f"no {needed}; type: pip install .[dev]")
        path = str(EXAMPLES / name)
        if visible:
            return run(tmp_path, path, visible=visible, num_ranks=num_ranks)
        return forked(forker, tmp_path, path, "--epochs", "3")

    return done


@on_each_device
@pytest.mark.parametrize("name", [*TRAINING, WRITING])
def test_trains(ran: Callable[[str, str, int], Done], name: str, visible: str, num_ranks: int) -> None:
    """The loss falls to less than half, also from buffers that the dataset writes; on GPUs, ranks are where planned."""
    done = ran(name, visible, num_ranks)
    found = losses(done.out)
    assert len(found) >= 3
    assert found[-1] < found[0] / 2
    if name == "train_fsdp.py":
        assert f"rank 0 holds {1 / num_ranks:.1%} of the parameters" in done.out
    if name == "train_accelerate.py":
        assert done.err.count(TAKEN_OVER) == 1  # a copy of numapin's loader is still numapin's


@on_each_device
def test_unmodified(ran: Callable[[str, str, int], Done], tmp_path: Path, visible: str, num_ranks: int) -> None:
    """A script that does not import numapin gets its data path by an option, in each rank, with the same losses."""
    torchs = ran(UNMODIFIED, visible, num_ranks)
    (tmp_path / "numapin").mkdir()
    program = (script(tmp_path, RUNS, "runs.py"), str(EXAMPLES / UNMODIFIED), *(() if visible else ("--epochs", "3")))
    ours = run(tmp_path / "numapin", "--dataloader=numapin", *program, visible=visible, num_ranks=num_ranks)
    assert (torchs.err.count(TAKEN_OVER), ours.err.count(TAKEN_OVER)) == (0, 1)
    assert losses(ours.out) == pytest.approx(losses(torchs.out), rel=0.05 if visible else 0, abs=0)
    assert losses(ours.out)[-1] < losses(ours.out)[0] / 2


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_documented(path: Path) -> None:
    """Each example has fewer than 100 lines, says how to run it and what to expect, and is in the table."""
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) < 100
    assert "numapin run" in said
    assert "Expect" in said
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text()


def test_preemption(tmp_path: Path, forker: Forker) -> None:
    """A run that SIGUSR1 to one rank stops, and that is started again, ends bitwise as an undisturbed one.

    So it does although a rank is killed meanwhile, which costs a restart from the last whole epoch.
    """
    path, last = tmp_path / "checkpoint.pt", tmp_path / "undisturbed.pt"
    forked(forker, tmp_path, CHECKPOINTING, "--epochs", EPOCHS, "--checkpoint", last.name)
    program = script(tmp_path, forker.client(CHECKPOINTING, (signal.SIGUSR1, signal.SIGTERM)))
    with _Job(path, program) as job:
        job.wait_for_epoch()
        os.kill(job.pid_of(1), signal.SIGUSR1)
        assert job.end() == 0
    assert (tmp_path / "requeued").exists()
    assert torch.load(path)[2] < torch.load(last)[2]
    with _Job(path, program) as job:
        job.wait_for_epoch()
        os.kill(job.pid_of(1), signal.SIGKILL)
        assert job.end() == 0
        assert job.pid_of(1, restart=1)
    assert all(torch.equal(*pair) for pair in zip(_state(path), _state(last), strict=True))


class _Job:
    """A running checkpointing example; killed if its `with` block fails."""

    def __init__(self, checkpoint: Path, program: str) -> None:
        self._runs = checkpoint.parent / f"runs-{len(list(checkpoint.parent.glob('runs-*')))}"
        self._out, self._err = self._runs.with_suffix(".out"), self._runs.with_suffix(".err")
        line = CommandLine(
            module="numapin",
            arguments=(
                *("run", "--quiet", "--nproc-per-node", "2", "--max-restarts", "1", program),
                *("--epochs", EPOCHS, "--checkpoint", checkpoint.name, "--requeue", "touch requeued"),
            ),
            environ=environment(CUDA_VISIBLE_DEVICES="", NUMAPIN_RUN_DIR=str(self._runs), **ONE_THREAD),
            cwd=str(checkpoint.parent),
        )
        self._process = start(line, out=self._out, err=self._err, fork=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()

    def wait_for_epoch(self) -> None:
        wait_until(lambda: "\n" in self._out.read_text() or self._process.poll() is not None, limit_s=120)
        assert self._out.read_text().startswith("epoch"), self._err.read_text()

    def pid_of(self, rank: int, *, restart: int = 0) -> int:
        (found,) = (r for r in observed(self._runs) if (r["local_rank"], r["restart"]) == (rank, restart))
        return int(found["pid"])

    def end(self) -> int:
        return self._process.wait(120)


def _state(path: Path) -> list[torch.Tensor]:
    """Return the tensors and numbers of a checkpoint."""
    net, optimizer, seen, own = torch.load(path, map_location="cpu")
    return [torch.as_tensor(each) for each in tree_flatten((net, optimizer["state"], seen, [rng for rng, _ in own]))[0]]
