"""Datasets, samplers and an interruption, for tests of a loader's state. Spawned workers can import them."""

from __future__ import annotations

import io
import math
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numapin

    Make = Callable[[], numapin.DataLoader[Any]]


class Numbers(Dataset[int]):
    """The numbers below `size`."""

    def __init__(self, size: int) -> None:
        self.size, self.num_read = size, 0

    def __len__(self) -> int:
        """Return the size."""
        return self.size

    def __getitem__(self, index: int) -> int:
        """Return the number, and count the call."""
        self.num_read += 1
        return index


class Stream(IterableDataset[int]):
    """The numbers below `size`, shuffled by Python's own generator if `shuffles`."""

    def __init__(self, size: int, *, shuffles: bool = False) -> None:
        self.size, self.shuffles = size, shuffles

    def __iter__(self) -> Iterator[int]:
        """Return a generator."""
        numbers = list(range(self.size))
        if self.shuffles:
            random.shuffle(numbers)
        yield from numbers


class Counting(Stream):
    """A stream that knows its place: it begins again after its end."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        """Return a generator from the place on."""
        while self.place < self.size:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a place."""
        self.place = state["place"]


class PythonShuffled(Sampler[list[int]]):
    """Batches of three, shuffled by Python's and numpy's own generators at each start."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        """Return the number of batches."""
        return math.ceil(self.size / 3)

    def __iter__(self) -> Iterator[list[int]]:
        """Return a generator."""
        numbers = list(range(self.size))
        random.shuffle(numbers)
        numbers = [numbers[index] for index in np.random.permutation(self.size)]  # noqa: NPY002 - what users call
        yield from (numbers[start : start + 3] for start in range(0, self.size, 3))


class Chunks(Sampler[int]):
    """A shuffle buffer: each chunk of eight is shuffled when it begins, by Python's own generator or a given one."""

    def __init__(self, size: int, generator: random.Random | None = None) -> None:
        self.size, self.generator = size, generator

    def __iter__(self) -> Iterator[int]:
        """Return a generator."""
        for start in range(0, self.size, 8):
            chunk = list(range(start, start + 8))
            (self.generator or random).shuffle(chunk)
            yield from chunk


class Owning(PythonShuffled):
    """Batches of three, shuffled by generators of its own, of three libraries."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size)
        self.python, self.numpy = random.Random(seed), np.random.default_rng(seed)  # noqa: S311 - not a secret
        self.legacy = np.random.RandomState(seed)

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator whose order is drawn at once."""
        numbers = list(range(self.size))
        self.python.shuffle(numbers)
        numbers = [numbers[i] for i in self.numpy.permutation(self.size)]
        numbers = [numbers[i] for i in self.legacy.permutation(self.size)]
        return iter([numbers[start : start + 3] for start in range(0, self.size, 3)])


class Remembering(Sampler[int]):
    """A sampler with a state: the numbers that are left of a shuffled epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, list[int]()
        self.num_begun = 0

    def __len__(self) -> int:
        """Return the length of an epoch."""
        return self.size

    def __iter__(self) -> Iterator[int]:
        """Return a generator over the rest of an epoch, or over a new one."""
        self.num_begun += 1
        if not self.left:
            self.left = random.sample(range(self.size), self.size)
        while self.left:
            yield self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return what is left."""
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what is left."""
        self.left = list(state["left"])


class RememberingBatches(Remembering):
    """The same, in batches of one."""

    def __iter__(self) -> Iterator[Any]:
        """Return a generator of batches."""
        yield from ([number] for number in super().__iter__())


class StatefulIterator:
    """An iterator over shuffled numbers with a state of its own."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> StatefulIterator:
        """Return itself."""
        return self

    def __next__(self) -> int:
        """Return the next number."""
        if not self.numbers:
            raise StopIteration
        return self.numbers.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return what is left."""
        return {"numbers": list(self.numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what is left."""
        self.numbers = list(state["numbers"])


class Begun(Sampler[int]):
    """A sampler whose iterator has a state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        """Return the iterator."""
        return StatefulIterator(random.sample(range(self.size), self.size))


class BegunStream(IterableDataset[int]):
    """A dataset whose iterator has a state."""

    def __iter__(self) -> Iterator[int]:
        """Return the iterator."""
        return StatefulIterator(random.sample(range(20), 20))


def flat(batches: Any) -> list[int]:
    """Return the numbers of batches."""
    return [int(number) for batch in batches for number in torch.as_tensor(batch).reshape(-1)]


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it comes back from a file, read without unpickling arbitrary classes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def interrupt(make: Make, stop: int) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return what a loader yields up to a batch, what it yields after it, and the state in between."""
    loader = make()
    iterator = iter(loader)
    first = flat(next(iterator) for _ in range(stop))
    state = saved(loader.state_dict())
    return first, flat(iterator), state


def disturb() -> None:
    """Let a new process have other random numbers."""
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002 - the generator that samplers use
    torch.manual_seed(99)


class Shards(IterableDataset[int]):
    """Each worker's part of the numbers below `size`, the first longer than the others."""

    def __init__(self, size: int) -> None:
        self.size = size

    def numbers(self) -> list[int]:
        """Return this worker's numbers."""
        info = get_worker_info()
        mine, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        cut = self.size // 3
        return [*(range(cut) if mine == 0 else ()), *range(cut + mine, self.size, num_workers)]

    def __iter__(self) -> Iterator[int]:
        """Return a generator."""
        yield from self.numbers()


class ShuffledShards(Shards):
    """The same, shuffled by the worker's generator."""

    def __iter__(self) -> Iterator[int]:
        """Return a generator."""
        numbers = self.numbers()
        yield from (numbers[index] for index in torch.randperm(len(numbers)).tolist())


class CountingShards(Shards):
    """The same, with a place that begins again after the end."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        """Return a generator from the place on."""
        numbers = self.numbers()
        while self.place < len(numbers):
            self.place += 1
            yield numbers[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a place."""
        self.place = state["place"]


class BegunShards(Shards):
    """The same, with an iterator that has a state."""

    def __iter__(self) -> Iterator[int]:
        """Return the iterator."""
        return StatefulIterator(self.numbers()[::-1])


class OwnIterator(CountingShards):
    """The same, and its own iterator."""

    def __iter__(self) -> Iterator[int]:
        """Return itself."""
        return self

    def __next__(self) -> int:
        """Return the next number; the end begins again."""
        numbers = self.numbers()
        if self.place == len(numbers):
            self.place = 0
            raise StopIteration
        self.place += 1
        return numbers[self.place - 1]


class BeginsAgain(OwnIterator):
    """The same, and every `iter()` begins again."""

    def __iter__(self) -> Iterator[int]:
        """Return itself, at the start."""
        self.place = 0
        return self


class ShuffledAgain(Sampler[int]):
    """A sampler that is its own iterator; every `iter()` draws a new order from a generator of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, list[int]()
        self.generator = random.Random(size)  # noqa: S311 - not a secret

    def __len__(self) -> int:
        """Return the length of an epoch."""
        return self.size

    def __iter__(self) -> Iterator[int]:
        """Return itself, at the start of a new order."""
        self.left = self.generator.sample(range(self.size), self.size)
        return self

    def __next__(self) -> int:
        """Return the next index."""
        if not self.left:
            raise StopIteration
        return self.left.pop()


class CallCounter(Numbers):
    """A map-style dataset whose items show how many calls its copy has had; the state is that number."""

    def __getitem__(self, index: int) -> int:
        """Return the index in thousands, and the number of calls."""
        return 1000 * super().__getitem__(index) + self.num_read

    def state_dict(self) -> dict[str, int]:
        """Return the number of calls."""
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with a number of calls."""
        self.num_read = state["num_read"]


class SlowStart(Numbers):
    """A map-style dataset whose first item is late in the first worker."""

    def __getitem__(self, index: int) -> int:
        """Return the number."""
        info = get_worker_info()
        if info is not None and info.id == 0 and not self.num_read:
            time.sleep(0.3)
        return super().__getitem__(index)


class Failing(CallCounter):
    """Its state cannot be read."""

    def state_dict(self) -> dict[str, int]:
        """Raise."""
        raise LookupError("the shard index is gone")
