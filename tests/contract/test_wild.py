"""Data as people have it: batches, and what users change in torch, work as with torch's loader."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import collate

from tests.contract.datasets import row
from tests.contract.describe import assert_same_batches, describe
from tests.contract.seam import Miss
from tests.contract.watching import TORCH, LoaderClass, assert_as_torch, assert_same_seen, watch
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NUM_BATCHES = 12  # more than there are slots, so that some travel in a free one
SHARED = row(5).share_memory_()


@dataclass(frozen=True, slots=True)
class Made(Dataset[Any]):
    """Samples made by a function of their index."""

    make: Callable[[int], Any]

    def __len__(self) -> int:
        """Return the number of samples, for two in a batch."""
        return 2 * NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`."""
        return self.make(index)


class Wrapped(torch.Tensor):
    """A tensor such as torchvision's: only these functions return its class, others a plain tensor."""

    KEPT: ClassVar = {torch.Tensor.clone, torch.Tensor.to, torch.Tensor.detach, torch.Tensor.requires_grad_}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and choose the class of its result."""
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            is_tensor = isinstance(out, torch.Tensor)
            return out.as_subclass(cls if func in cls.KEPT else torch.Tensor) if is_tensor else out


class Named(torch.Tensor):
    """A tensor whose stack is of its own class, with an attribute."""

    name: str


@dataclass
class Annotated:
    """A user's class around arrays and tensors."""

    image: torch.Tensor
    rest: dict[str, Any]


def wrapped(index: int) -> torch.Tensor:
    """Return a tensor of the first class."""
    return row(index).as_subclass(Wrapped)


def named(index: int) -> torch.Tensor:
    """Return a tensor of the second class, with an attribute that holds a tensor."""
    tensor = row(index).as_subclass(Named)
    tensor.__dict__["boxes"] = row(index, (50, 4))
    return tensor


def ragged(index: int) -> torch.Tensor:
    """Return a tensor whose length depends on the index."""
    return row(index, (3000 + index,))


def pad(batch: Sequence[torch.Tensor], *, collate_fn_map: object = None) -> torch.Tensor:
    """Collate tensors of different lengths."""
    del collate_fn_map
    return pad_sequence(list(batch), batch_first=True)


def pad_by_own_map(batch: Any) -> object:
    """Collate with torch's function and the user's own map."""
    return collate.collate(batch, collate_fn_map={torch.Tensor: pad})


def stack_by_own_map(batch: Any) -> object:
    """Collate with a copy of torch's own map, made before the workers started."""
    return collate.collate(batch, collate_fn_map=TORCHS_MAP)


def stack_into_shared(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack into new shared memory, as PyTorch Geometric does."""
    numel = sum(tensor.numel() for tensor in batch)
    storage = batch[0].untyped_storage()._new_shared(numel * batch[0].element_size())
    out = torch.empty(0, dtype=batch[0].dtype).set_(storage).resize_(len(batch), *batch[0].shape)
    return torch.stack(list(batch), out=out)


def read_only(index: int, dtype: str = "<f8", size: int = 5000) -> np.ndarray[Any, Any]:
    """Return an array that may not be written, such as Arrow's."""
    array = (np.arange(size) + index).astype(dtype)
    array.flags.writeable = False
    return array


def fixed(index: int) -> tuple[torch.Tensor, ...]:
    """Return a large and a small tensor on the host, whatever the default device is."""
    return torch.full((64, 64), float(index), device="cpu"), torch.full((9,), float(index), device="cpu")


def use_meta(_worker: int) -> None:
    """Change the default device in a worker."""
    torch.set_default_device("meta")


def refuse_slots(_worker: int) -> None:
    """Let the kernel refuse this worker memory for slots."""

    def refuse(_name: str, _flags: int) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    os.memfd_create = refuse  # type: ignore[assignment] # in this worker only


TORCHS_MAP = dict(collate.default_collate_fn_map)
ROW: torch.Tensor = row(3)
CASES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "wrapped-stacked": (wrapped, default_collate),
    "wrapped-listed": (wrapped, list),
    "named-stacked": (named, default_collate),
    "named-listed": (named, list),
    "own-map": (ragged, pad_by_own_map),
    "copied-map": (row, stack_by_own_map),
    "into-shared-memory": (row, stack_into_shared),
    "read-only": (read_only, list),
    "read-only-stacked": (read_only, default_collate),
    "read-only-fortran": (lambda index: read_only(index).reshape(50, 100).T, list),
    "read-only-small": (lambda index: (read_only(index, size=9), row(index)), list),
    "read-only-records": (lambda index: read_only(index).view([("x", "<f4"), ("y", "<i4")]), list),
    "other-byte-order": (lambda index: (read_only(index, ">f8").copy(), row(index)), list),
    "other-byte-order-read-only": (lambda index: (read_only(index, ">i4"), row(index)), list),
    "axes-in-another-order": (lambda index: np.arange(6000.0).reshape(10, 20, 30).transpose(2, 0, 1) + 0 * index, list),
    "axes-reversed": (lambda index: (np.arange(6000.0) + index).reshape(60, 100)[::-1, ::2], list),
    "many-tiny": (lambda index: [torch.tensor(index + n) for n in range(50)], list),
    "the-same-each-time": (lambda _: ROW, list),
    "bytes": (lambda index: bytes([index]) * 50_000, list),
    "long-texts-and-labels": (lambda index: {"text": f"{index} " * 30_000, "label": torch.tensor(index)}, list),
    "inside-objects": (lambda index: Annotated(row(index), {"mask": read_only(index)}), list),
    "channels-last": (
        lambda index: row(index, (1, 3, 40, 40)).contiguous(memory_format=torch.channels_last),
        torch.cat,
    ),
}


@contextmanager
def entry(kind: type, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function into torch's map for the time of the block."""
    before = dict(collate.default_collate_fn_map)
    collate.default_collate_fn_map[kind] = function
    try:
        yield
    finally:
        collate.default_collate_fn_map.clear()
        collate.default_collate_fn_map.update(before)


def stats_of(loader: Any) -> Any:
    """Run an epoch that keeps no batch, and return the statistics."""
    for _ in loader:
        pass
    return loader.stats()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writ")
def test_as_torch(own_class: LoaderClass, name: str) -> None:
    """Batches equal torch's, and all that is large in them travels in slots."""
    make, collate_fn = CASES[name]
    made: list[Any] = []

    def loader(kind: LoaderClass) -> Any:
        made.append(kind(Made(make), batch_size=2, num_workers=1, collate_fn=collate_fn))
        return made[-1]

    theirs = watch(lambda: loader(TORCH))
    assert_same_seen(watch(lambda: loader(own_class)), theirs)
    stats = made[-1].stats()
    assert stats.hits > 0
    assert not stats.misses


class TestUsersEntries:
    """Functions that the user put into `default_collate_fn_map`."""

    def test_for_tensors(self, own_class: LoaderClass) -> None:
        """The user's function for tensors is called, and not numapin's."""
        with entry(torch.Tensor, pad):
            theirs = assert_as_torch(own_class, lambda: {"dataset": Made(ragged), "batch_size": 2, "num_workers": 1})
        assert len(theirs.epochs[0]) == NUM_BATCHES
        assert "Failure" not in repr(theirs)

    def test_for_a_subclass(self, own_class: LoaderClass) -> None:
        """A function for a subclass is called for that subclass only."""
        with entry(Named, pad):
            dataset = Made(lambda index: (ragged(index).as_subclass(Named), row(index)))
            theirs = assert_as_torch(own_class, lambda: {"dataset": dataset, "batch_size": 2, "num_workers": 1})
        assert "Failure" not in repr(theirs)

    def test_that_call_torchs_own(self, own_class: LoaderClass) -> None:
        """A function that wraps torch's own still puts batches into slots."""
        torchs_own = collate.collate_tensor_fn

        def doubled(batch: Any, **options: Any) -> Any:
            return torchs_own(batch, **options).mul_(2)

        with entry(torch.Tensor, doubled):
            assert_as_torch(own_class, lambda: {"dataset": Made(row), "batch_size": 2, "num_workers": 1})
            assert stats_of(own_class(Made(row), batch_size=2, num_workers=1)).hits > 0


class TestHits:
    """`hits` counts only batches whose large tensors all traveled in slots."""

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda index: (row(index), SHARED), Miss.SHARED),
            (lambda index: (row(index), row(index).requires_grad_()), Miss.UNSUPPORTED),
            (lambda index: (row(index), torch.nn.Parameter(row(index))), Miss.UNSUPPORTED),
        ],
    )
    def test_a_large_tensor_outside(self, own_class: LoaderClass, make: Any, reason: Miss) -> None:
        """A large tensor that is sent outside the slots makes its batch a miss."""
        stats = stats_of(own_class(Made(make), batch_size=2, num_workers=1, collate_fn=list))
        assert stats.hits == 0
        assert reason in stats.misses

    @pytest.mark.parametrize("collate_fn", [None, list])
    def test_slots_turned_off(self, own_class: LoaderClass, collate_fn: Any) -> None:
        """Without slots that is the reason, although torch's collation puts batches into shared memory."""
        options: dict[str, Any] = {"collate_fn": collate_fn, "pinned_budget": 0}
        loader = own_class(Made(row), batch_size=2, num_workers=1, **options)
        assert stats_of(loader).misses == {Miss.NO_SLOTS: NUM_BATCHES}

    def test_no_memory_for_slots(self, own_class: LoaderClass) -> None:
        """If the kernel refuses memory for slots that is the reason, too."""
        loader = own_class(Made(row), batch_size=2, num_workers=1, worker_init_fn=refuse_slots)
        assert stats_of(loader).misses == {Miss.NO_MEMORY: NUM_BATCHES}

    def test_a_small_tensor_outside(self, own_class: LoaderClass) -> None:
        """A small tensor outside the slots, or one without memory, does not."""
        small = SHARED[0, :9]
        dataset = Made(
            lambda index: (row(index), small, torch.ones(3).requires_grad_(), torch.empty(99, device="meta"))
        )
        stats = stats_of(own_class(dataset, batch_size=2, num_workers=1, collate_fn=list))
        assert stats.hits > 0
        assert stats.notes == ()


class TestDefaults:
    """torch's defaults for new tensors, changed in the rank."""

    @pytest.mark.parametrize("collate_fn", [default_collate, list])
    def test_device(self, own_class: LoaderClass, collate_fn: Any) -> None:
        """With another default device, in the rank and in its workers, batches made on the host stay there."""
        seen = []
        for kind in (own_class, TORCH):
            options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": use_meta}
            # torch's own __init__ of an iterator fails under "meta"
            iterator = iter(kind(Made(fixed), batch_size=2, collate_fn=collate_fn, **options))
            torch.set_default_device("meta")
            try:
                batches = list(iterator)
            finally:
                torch.set_default_device(None)
            seen.append([describe(batch) for batch in batches])
        assert len(seen[1]) == NUM_BATCHES
        assert_same_batches(*seen)

    def test_dtype(self, own_class: LoaderClass) -> None:
        """Another default dtype changes what the dataset makes, and nothing else."""
        torch.set_default_dtype(torch.float64)
        try:
            assert_as_torch(own_class, lambda: {"dataset": Made(row), "batch_size": 2, "num_workers": 1})
        finally:
            torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
    def test_a_loop_without_gradients(self, own_class: LoaderClass, mode: Any) -> None:
        """Inside inference_mode or no_grad, batches are what torch's are, and can be edited in place."""
        found: list[Any] = []
        for kind in (own_class, TORCH):
            with mode():
                batches = list(kind(Made(row), batch_size=2, num_workers=1))
                found.append([(batch.is_inference(), batch.mul_(2).sum().item()) for batch in batches])
        assert found[0] == found[1]


class TestSubclasses:
    """Subclasses of the loader with names and methods of their own."""

    def test_equality(self, own_class: LoaderClass) -> None:
        """Loaders that compare equal, and have no hash, have their own counts."""

        class Same(own_class):  # type: ignore[valid-type, misc]
            __hash__ = None  # type: ignore[assignment]

            def __eq__(self, other: object) -> bool:
                return True

        first, second = (Same(Made(row), batch_size=2, num_workers=1) for _ in range(2))
        assert len(list(first)) == NUM_BATCHES
        assert (first.stats().batches, second.stats().batches) == (NUM_BATCHES, 0)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_attributes(self, own_class: LoaderClass, is_first: bool) -> None:  # noqa: FBT001
        """Attributes with the names of numapin's stay the subclass's, set before or after init."""
        names = ("_path", "_options", "_home", "stats", "close", "device", "node", "strict", "pinned_budget")

        class Own(own_class):  # type: ignore[valid-type, misc]
            def __init__(self, dataset: Any, **rest: Any) -> None:
                if not is_first:
                    super().__init__(dataset, **rest)
                for name in names:
                    setattr(self, name, f"the user's {name}")
                if is_first:
                    super().__init__(dataset, **rest)

        loader = Own(Made(row), batch_size=2, num_workers=1)
        assert_same_batches([describe(batch) for batch in loader], [describe(b) for b in TORCH(Made(row), 2)])
        assert all(getattr(loader, name) == f"the user's {name}" for name in names)

    def test_properties(self, own_class: LoaderClass) -> None:
        """Properties with the names of numapin's attributes are the subclass's."""

        class Own(own_class):  # type: ignore[valid-type, misc]
            device = property(lambda _: "the user's")
            _path = property(lambda _: "the user's")

        loader = Own(Made(row), batch_size=2, num_workers=1)
        assert len(list(loader)) == NUM_BATCHES
        assert (loader.device, loader._path) == ("the user's", "the user's")


class Keeping:
    """A collate function that keeps all batches, and returns their sums so far with the next."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, samples: list[torch.Tensor]) -> tuple[torch.Tensor, list[float]]:
        """Collate, and keep the result."""
        self.kept.append(torch.utils.data.default_collate(samples))
        return self.kept[-1], [float(batch.sum()) for batch in self.kept]


def test_poison_spares_what_a_worker_keeps(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NUMAPIN_POISON=1, what a collate function keeps in its worker is not overwritten."""
    monkeypatch.setenv("NUMAPIN_POISON", "1")

    def sums(kind: LoaderClass) -> list[Any]:
        return [told for _, told in kind(Made(row), batch_size=2, num_workers=1, collate_fn=Keeping())]

    assert sums(own_class) == sums(TORCH)


def test_poison_overwrites_the_rest(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NUMAPIN_POISON=1, memory that is read after its release has other values."""
    monkeypatch.setenv("NUMAPIN_POISON", "1")
    iterator: Any = iter(own_class(Made(row), batch_size=2, num_workers=1))
    for _ in range(NUM_BATCHES - 2):
        next(iterator)
    last_but_one = next(iterator)
    first_byte = ctypes.c_ubyte.from_address(last_but_one.data_ptr())
    assert first_byte.value != 0xA5
    del last_but_one
    next(iterator)  # and the workers have nothing left to write
    assert wait_until(lambda: iterator._lane.reclaim() or first_byte.value == 0xA5, limit_s=10)


def test_statistics_as_text_and_as_dict(own_class: LoaderClass) -> None:
    """They print as a block of at most 80 columns, and are a dict that JSON can hold."""
    loader: Any = own_class(Made(row), batch_size=2, num_workers=1)
    stats = stats_of(loader)
    lines = str(stats).splitlines()
    assert lines[0].split()[:2] == ["batches", f"{NUM_BATCHES},"]
    assert all(len(line) <= 80 for line in lines)
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()
    assert stats.as_dict()["hits"] == stats.hits
