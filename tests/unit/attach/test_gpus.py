"""The GPU of a process, from its environment and from the driver."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.machines.grids import grid
from tests.recorded.screens import compare_answers
from tests.unit.attach.seam import gpu_of, gpus_of_ranks, local_rank

MACHINE = grid(gpus=[0, 0, 1, 1])


def _answer(line: str) -> str:
    """Return the GPU of a process with these variables that computes on these GPUs, and the source."""
    words = dict(word.split("=", 1) for word in shlex.split(line))
    computing = [MACHINE.gpus[int(index)].uuid or "" for index in words.pop("computing", "").split(",") if index]
    machine = grid() if words.pop("host", "") else MACHINE
    gpu, source = gpu_of(machine, words, computing)
    return f"{gpu and gpu.label}: {source}"


def test_the_gpu_of_a_process() -> None:
    """The driver's word comes first, then LOCAL_RANK among the visible GPUs, then the only visible one."""
    compare_answers(Path(__file__).with_name("gpus.txt"), _answer)


@pytest.mark.parametrize("text", ["", "x", "-1", "1 ", "99999", "\x1b[31m"])
def test_rank_that_no_launcher_writes(text: str) -> None:
    """A LOCAL_RANK that is not a rank's number counts as none."""
    assert local_rank({"LOCAL_RANK": text}) is None


@pytest.mark.parametrize(
    ("visible", "given", "num_ranks", "expected"),
    [
        ([0, 1], {}, 2, (0, 1)),
        ([0, 1], {1: 0}, 2, (1, 0)),
        ([0, 1], {0: 1, 1: 1}, 2, (1, 1)),
        ([0, 1], {1: 0}, 4, (1, 0, 0, 1)),
        ([0, 1], {0: 0}, 4, (0, 1, 0, 1)),
        ([2, 3], {1: 0}, 2, (2, 0)),
        ([0], {1: 0}, 2, (None, 0)),
        ([], {1: 0}, 2, (None, 0)),
    ],
)
def test_the_gpus_of_other_ranks(
    visible: list[int], given: dict[int, int], num_ranks: int, expected: tuple[int | None, ...]
) -> None:
    """Ranks that are not bound are taken to use the GPUs of their turns, but not one that another rank was given."""
    assert gpus_of_ranks(visible, given, num_ranks) == expected
