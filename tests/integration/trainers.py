"""Training jobs that are killed again and again, each forked from this process, which has imported torch once.

Usage: python -m tests.integration.trainers FOLDER SEED CASE=KILLS... Output: for each case a JSON line with the samples
that the checkpoint says were trained, epoch by epoch, and the number of kills in the middle of an epoch.

A trainer saves the loader's state, with the samples trained so far, after each batch. It is killed at a random moment
after a random number of batches; the next one continues from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

import numapin

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE: Final = 30
_MAX_STEPS: Final = 9
_RANKS: Final = 2


class Numbers(Dataset[int]):
    """The numbers below SIZE."""

    def __len__(self) -> int:
        """Return the size."""
        return SIZE

    def __getitem__(self, index: int) -> int:
        """Return the number."""
        return index


def flat(batches: Any) -> list[int]:
    """Return the numbers of batches."""
    return [int(number) for batch in batches for number in torch.as_tensor(batch).reshape(-1)]


def _distributed() -> numapin.StatefulDataLoader[Any]:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(), seed=3)
    return numapin.StatefulDataLoader(Numbers(), 1, sampler=sampler, num_workers=1)


CASES: Final[dict[str, Callable[[], numapin.StatefulDataLoader[Any]]]] = {
    "shuffle": lambda: numapin.StatefulDataLoader(Numbers(), 2, shuffle=True, num_workers=2),
    "gloo": _distributed,
}


class Trainer:
    """One rank of a job, in its own process."""

    def __init__(self, case: str, path: Path, *, rank: int, num_ranks: int) -> None:
        """Continue from the checkpoint, if there is one."""
        self._path, self._rank, self._num_ranks = path, rank, num_ranks
        self._loader = CASES[case]()
        self._trained: list[list[int]] = [[]]
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self._trained = saved["trained"]
            self._loader.load_state_dict(saved["loaders"][rank])

    def run(self, steps: int) -> None:
        """Train until killed; report each step through a pipe."""
        while True:
            if isinstance(self._loader.sampler, DistributedSampler):
                self._loader.sampler.set_epoch(len(self._trained) - 1)
            for batch in self._loader:
                self._save(flat([batch]))
                os.write(steps, b".")
            self._trained.append([])
            self._save([])

    def _save(self, trained: list[int]) -> None:
        mine = (trained, self._loader.state_dict())
        everyone: list[Any] = [mine] * self._num_ranks
        if self._num_ranks > 1:
            dist.all_gather_object(everyone, mine)
        self._trained[-1] += [number for numbers, _ in everyone for number in numbers]
        if self._rank == 0:
            new = self._path.with_suffix(".new")
            torch.save({"trained": self._trained, "loaders": [state for _, state in everyone]}, new)
            new.replace(self._path)


def _start(case: str, path: Path, rank: int, store: Path, steps: int) -> int:
    """Fork a rank and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        random.seed()  # as in a new process
        torch.seed()
        num_ranks = _RANKS if case == "gloo" else 1
        if num_ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        Trainer(case, path, rank=rank, num_ranks=num_ranks).run(steps)
    finally:
        os._exit(1)


def kill_once(case: str, path: Path, store: Path, chance: random.Random) -> None:
    """Start the job, and kill it at a random moment after a random number of steps."""
    reading, writing = os.pipe()
    num_ranks = _RANKS if case == "gloo" else 1
    pids = [_start(case, path, rank, store, writing) for rank in range(num_ranks)]
    os.close(writing)
    for _ in range(num_ranks * chance.randrange(1, _MAX_STEPS)):
        if not os.read(reading, 1):
            raise RuntimeError(f"{case}: a trainer has ended")
    time.sleep(chance.random() / 200)
    chance.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(reading)


def main() -> None:
    """Run the cases."""
    folder, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))  # noqa: S311 - not a secret
    for argument in sys.argv[3:]:
        case, _, kills = argument.partition("=")
        path = folder / f"{case}.pt"
        for number in range(int(kills)):
            kill_once(case, path, folder / f"{case}-{number}", chance)
        print(json.dumps({"case": case, "trained": torch.load(path, weights_only=True)["trained"]}))  # noqa: T201


if __name__ == "__main__":
    main()
