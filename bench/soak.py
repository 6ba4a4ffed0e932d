"""Many kinds of loops over numapin.DataLoader, again and again: every value is checked, and no resource may grow.

    python -m bench.soak --seconds 600 --json soak.json       on a GPU if there is one
    python -m bench.soak --seconds 10 --quick                 smoke test with small batches

A round runs each kind of loop once, with a new loader: equal batches; batches of random sizes with outliers; a loop
that keeps batches and checks them again later; `pin_memory=True` with the loop's own copies on another stream; dicts
that are narrowed to bfloat16; batches written into `batch_buffer`; epochs that the loop leaves early. Each sample is
filled with its own number, so a batch is compared with its indices, on the GPU where it arrives.

After each round, once all loaders are gone, the process is read: its resident memory, memory in slots, pinned memory,
descriptors, threads, child processes, and the memory of torch's allocator on the GPU. After the first rounds, which
fill caches, none of them may grow. Exit status 1 if a value was wrong or something grew; JSON has every round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch.utils.data import Dataset

import numapin
from numapin.base.files import write_text_to
from numapin.bench.machine import read_machine
from numapin.data.packing import SLOT_NAME
from numapin.system import proc
from numapin.system.pages import PINNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.data import DataLoader

T = TypeVar("T")

_NUM_FIRST_ROUNDS: Final = 2  # they fill caches: torch's allocators, the C library's, cuDNN's
_MAX_GROWTH_MB: Final = 32.0  # of resident memory, over the whole soak; Python's and the C library's noise
_NUM_KEPT: Final = 12
_MODULUS: Final = 120  # a sample's values; fits every dtype, bfloat16 exactly
_SETTLE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the process holds after a round, in MB (1e6 bytes) or as a number."""

    resident_mb: float
    slots_mb: float
    pinned_mb: float
    gpu_mb: float
    descriptors: int
    threads: int
    children: int

    @classmethod
    def read(cls) -> Resources:
        """Read this process."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        return cls(
            resident_mb=int(status["VmRSS"].split()[0]) * 1024 / 1e6,
            slots_mb=sum(_slot_sizes()) / 1e6,
            pinned_mb=PINNED.total / 1e6,
            gpu_mb=on_gpu / 1e6,
            descriptors=len(list(Path("/proc/self/fd").iterdir())),
            threads=int(status["Threads"]),
            children=len(proc.children_in(os.getpid())),
        )


def _slot_sizes() -> Iterator[int]:
    """Yield the sizes of the slots that are mapped into this process, in bytes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if SLOT_NAME in line:
            first, last = line.split()[0].split("-")
            yield int(last, 16) - int(first, 16)


class Numbered(Dataset[Any]):
    """Samples that are filled with their number; `shape_of` gives the shape of each."""

    def __init__(self, num: int, shape_of: Callable[[int], tuple[int, ...]], dtype: torch.dtype) -> None:
        self._num, self._shape_of, self._dtype = num, shape_of, dtype

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a sample and its number."""
        return torch.full(self._shape_of(index), index % _MODULUS, dtype=self._dtype), index


class Dicts(Numbered):
    """The same as dicts of two tensors."""

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - another type than its base's
        """Return a sample."""
        sample, number = super().__getitem__(index)
        return {"values": sample, "more": {"values": sample[:3].clone()}, "number": number}


class Written(Numbered):
    """The same, written into the batch's own memory."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a batch."""
        batch = numapin.batch_buffer((len(indices), *self._shape_of(0)), self._dtype)
        for row, index in zip(batch.unbind(), indices, strict=True):
            row.fill_(index % _MODULUS)
        return batch, torch.tensor(indices)


def _same(batch: T) -> T:
    return batch


class Soak:
    """The loops. `is_right` stays true on the device while all values are right."""

    def __init__(self, *, device: torch.device, quick: bool, num_workers: int, seed: int) -> None:
        self._device, self._num_workers = device, num_workers
        self._scale, self._num = (16, 64) if quick else (1, 1024)
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self.num_batches = self.num_bytes = 0
        self.is_right = torch.ones((), dtype=torch.bool, device=device)
        self.loops: dict[str, Callable[[], None]] = {
            "equal": self._equal,
            "ragged": self._ragged,
            "kept": self._kept,
            "pinned": self._pinned,
            "cast": self._cast,
            "written": self._written,
            "left early": self._left_early,
        }

    def check(self, values: torch.Tensor, numbers: torch.Tensor) -> None:
        """Compare a batch with its samples' numbers, without waiting for the GPU."""
        numbers = numbers.to(self._device, non_blocking=True) % _MODULUS
        flat = values.reshape(len(numbers), -1)
        right = (flat == numbers[:, None].to(flat.dtype)).all()
        self.is_right &= right.to(self._device)
        self.num_batches += 1
        self.num_bytes += values.nbytes

    def _loader(self, dataset: Numbered, batch_size: int, **options: Any) -> DataLoader[Any]:  # noqa: ANN401
        if self._device.type == "cuda" and "pin_memory" not in options:
            options["device"] = self._device
        return numapin.DataLoader(
            dataset, batch_size=batch_size, num_workers=self._num_workers, shuffle=True, **options
        )

    def _images(self, kind: type[Numbered] = Numbered, dtype: torch.dtype = torch.uint8) -> Numbered:
        side = 224 // self._scale
        return kind(self._num, lambda _index: (3, side, side), dtype)

    def _equal(self) -> None:
        for values, numbers in self._loader(self._images(), 64):
            self.check(values, numbers)

    def _ragged(self) -> None:
        """One batch per sample, of 1 KB to 4 MB; one in a hundred has 64 MB."""
        sizes = [self._random.choice((1 << 10, 1 << 14, 1 << 18, 1 << 20, 4 << 20)) for _ in range(self._num)]
        for index in self._random.sample(range(self._num), max(1, self._num // 100)):
            sizes[index] = 64 << 20
        dataset = Numbered(self._num, lambda index: (sizes[index] // self._scale,), torch.uint8)
        for values, numbers in self._loader(dataset, 1):
            self.check(values, numbers)

    def _kept(self) -> None:
        """Keep batches for a while, and check them again before they go."""
        kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        for values, numbers in self._loader(self._images(), 32):
            self.check(values, numbers)
            kept.append((values, numbers))
            if len(kept) > self._random.randint(1, _NUM_KEPT):
                self.check(*kept.popleft())
        while kept:
            self.check(*kept.pop())

    def _pinned(self) -> None:
        """Copy from pinned batches on another stream, and drop them at once."""
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_gpu else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still write `is_right`
        for values, numbers in self._loader(self._images(), 64, pin_memory=on_gpu):
            with torch.cuda.stream(stream):
                moved = values.to(self._device, non_blocking=True)
                del values
                self.check(moved, numbers)
        if stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def _cast(self) -> None:
        dataset = self._images(Dicts, torch.float32)
        for batch in self._loader(dataset, 32, cast=torch.bfloat16):
            self.check(batch["values"], batch["number"])
            self.check(batch["more"]["values"], batch["number"])

    def _written(self) -> None:
        dataset = self._images(Written)
        for values, numbers in self._loader(dataset, 64, collate_fn=_same):
            self.check(values, numbers)

    def _left_early(self) -> None:
        """Leave epochs after a random number of batches, with workers that stay and with new ones."""
        for persistent in (True, False):
            loader = self._loader(self._images(), 16, persistent_workers=persistent)
            for _ in range(3):
                end = self._random.randint(0, self._num // 16)
                for number, (values, numbers) in enumerate(loader):
                    if number >= end:
                        break
                    self.check(values, numbers)

    def finish(self) -> bool:
        """Wait for the GPU; return whether all values were right."""
        return bool(self.is_right.item())


def _settled() -> Resources:
    """Read the resources once the closing threads have given back what they can: when two readings agree."""
    gc.collect()
    found, until_s = Resources.read(), time.monotonic() + _SETTLE_S
    while time.monotonic() < until_s:
        time.sleep(0.2)
        before, found = found, Resources.read()
        if (before.slots_mb, before.pinned_mb, before.threads) == (found.slots_mb, found.pinned_mb, found.threads):
            break
    return found


def growth(rounds: Sequence[Resources]) -> list[str]:
    """Return what grew: the second half of the rounds after the first ones against the first half, by the lowest."""
    later = rounds[_NUM_FIRST_ROUNDS:]
    if len(later) < 2:
        return []
    first, second = later[: len(later) // 2], later[len(later) // 2 :]
    grown = []
    for name in Resources.__dataclass_fields__:
        before, after = (min(getattr(each, name) for each in half) for half in (first, second))
        if after - before > (_MAX_GROWTH_MB if name == "resident_mb" else 0):
            grown.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return grown


def main(arguments: Sequence[str]) -> int:
    """Run rounds until the time is over; print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", default=600.0, type=float, help="start no round after this time")
    parser.add_argument("--workers", default=8, type=int, help="workers per loader")
    parser.add_argument("--seed", default=0, type=int, help="for sizes and the places where epochs are left")
    parser.add_argument("--quick", action="store_true", help="small batches and few of them")
    parser.add_argument("--json", metavar="FILE", help="write the rounds here")
    given = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    soak = Soak(device=device, quick=given.quick, num_workers=given.workers, seed=given.seed)
    rounds: list[Resources] = []
    machine = read_machine().to_json()
    started_s, is_right = time.monotonic(), True
    while is_right and (not rounds or time.monotonic() - started_s < given.seconds):
        for loop in soak.loops.values():
            loop()
        is_right = soak.finish()
        rounds.append(_settled())
        elapsed_s = time.monotonic() - started_s
        report = {
            "machine": machine,
            "seconds": elapsed_s,
            "batches": soak.num_batches,
            "bytes": soak.num_bytes,
            "is_right": is_right,
            "grown": growth(rounds),
            "rounds": [asdict(each) for each in rounds],
        }
        if given.json is not None:  # after each round, so that a soak that is ended keeps its results
            write_text_to(given.json, json.dumps(report, indent=1) + "\n", remedy="name another file with --json")
        figures = ", ".join(f"{name} {value:,.0f}" for name, value in asdict(rounds[-1]).items())
        verdict = "all right" if is_right else "WRONG VALUES"
        done = f"{soak.num_batches:,} batches, {soak.num_bytes / 1e9:,.0f} GB, {verdict}"
        print(f"round {len(rounds)}, {elapsed_s:.0f} s: {done}; {figures}", flush=True)
    grown = growth(rounds)
    print("\n".join(grown) or f"nothing grew in {len(rounds)} rounds")
    return 0 if is_right and not grown else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
