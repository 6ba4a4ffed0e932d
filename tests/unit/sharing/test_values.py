"""What comes back from `numapin.share` in a process that is alone: values, types, views, refusals."""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import math
import mmap
import os
import pickle
import resource
import tracemalloc
import warnings
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import numapin
from tests.contract.datasets import Made, Raise, Reduced
from tests.unit.sharing.seam import CpuSet, sealed

pytestmark = pytest.mark.usefixtures("modules_are_no_garbage")

Point = namedtuple("Point", "x y")  # noqa: PYI024 - as in users' data
LISTS: dict[str, Any] = {
    "tuples": [(f"train/{number}.jpg", number % 7) for number in range(5000)],
    "numbers": [0, -1, 1 << 80, 2.5, math.inf, True, None, 3j],
    "texts": ["", "ä", "\U0001f600", "\udc80", "a" * 100_000],
    "bytes": [b"", b"\0\xff", bytes(100_000)],
    "numpy's": [np.int64(3), np.float32(0.5), np.str_("x")],  # have a buffer, as bytes do
    "nested": [{"boxes": [(1, 2.0)], "name": None}, [[]], ()],
    "objects": [Point(1, date(2026, 1, 2)), Path("a"), {1, 2}, bytearray(b"x"), Point],
    "long entries": [list(range(2000)), {number: str(number) for number in range(2000)}],
    "empty": [],
}


def opened_files() -> dict[int, Path]:
    """Return the shared memory that this process has: by the file's number, the path of a descriptor."""
    gc.collect()  # an earlier test's exception may hold some
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this very listing
            if "numapin-share" in str(path.readlink()):
                found[path.stat().st_ino] = path
    return found


@pytest.mark.parametrize("name", LISTS)
def test_entries_have_value_and_type(name: str) -> None:
    """Entries of lists and tuples are equal to the original ones, and of the same type unless they are long."""
    original = LISTS[name]
    shared = numapin.share(tuple(original) if name == "tuples" else original)
    assert len(shared) == len(original)
    for index, value in enumerate(original):
        found = shared[index]
        if name == "long entries":
            assert (dict if isinstance(value, dict) else list)(found) == value
        else:
            assert (type(found), found) == (type(value), value)
    assert repr(list(shared)) == repr(shared[:])


def test_a_list_is_indexed_as_lists_are() -> None:
    """Negative and numpy's indices, slices, iteration and `in` do what they do with a list; so do wrong indices."""
    original = [(str(number), number) for number in range(10)]
    shared = numapin.share(original)
    assert [shared[-1], shared[np.int64(2)], shared[torch.tensor(3)]] == [original[-1], original[2], original[3]]
    assert shared[2:8:3] == original[2:8:3]
    assert shared[::-1] == original[::-1]
    assert ("4", 4) in shared
    assert shared.index(("4", 4)) == 4
    for index in (10, -11):
        with pytest.raises(IndexError):
            shared[index]
    with pytest.raises(TypeError):
        shared["0"]
    with pytest.raises(TypeError):
        shared[0] = 1
    shared = numapin.share([[1, 2], {"a": [3]}])
    shared[0].append(9)  # an entry is made anew
    shared[1]["a"].clear()
    assert list(shared) == [[1, 2], {"a": [3]}]


def test_keys_are_found_as_in_a_dict() -> None:
    """Equal keys of another type are found, missing ones raise KeyError, and the order is kept."""
    original: dict[Any, Any] = {f"k{number}": number for number in range(5000)}
    original |= {1: "one", 2.5: "two and a half", -1: "minus", b"b": "bytes", ("t", 1): "tuple", 1 << 70: "large"}
    shared = numapin.share(original)
    assert dict(shared) == original
    assert list(shared) == list(original)
    assert [shared[key] for key in (True, 1.0, np.int64(1), np.float64(2.5), ("t", 1.0))] == [
        *("one", "one", "one", "two and a half", "tuple")
    ]
    assert shared.get("missing") is None
    assert (list(shared.items()), list(shared.values())) == (list(original.items()), list(original.values()))
    for key in ("missing", 7, [], object()):
        with pytest.raises(KeyError):
            shared[key]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24, dtype=torch.int16).view(4, 6).t(),
        torch.arange(10, dtype=torch.bfloat16)[::2],
        torch.tensor(True),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.empty(0, 3),
        torch.ones(3, requires_grad=True),
        torch._efficientzerotensor((3,)),
    ],
    ids=["dense", "transposed", "strided", "scalar", "conjugated", "empty", "requires grad", "zeros without memory"],
)
def test_a_tensor_is_a_view(tensor: torch.Tensor) -> None:
    """A tensor has its value, dtype and shape, alone and in containers, and its memory is the sealed file."""
    alone, inside = numapin.share(tensor), numapin.share({"t": [tensor, 1]})["t"][0]
    for shared in (alone, inside):
        assert (shared.dtype, shared.shape, shared.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert torch.equal(shared, tensor.detach())
        assert shared.numel() == 0 or is_in_file(shared.data_ptr())


def test_a_write_to_a_tensor_stays_in_this_process() -> None:
    """A write changes the process's own copy of the page: neither it nor the file's seal ends the process."""
    before = opened_files().keys()
    shared = numapin.share([torch.zeros(4)])
    first = shared[0]
    first += 1
    (path,) = [path for number, path in opened_files().items() if number not in before]
    fd = int(path.name)
    assert torch.equal(shared[0], torch.ones(4))
    assert os.pread(fd, 16, 0) == bytes(16)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(20)[::3],
        np.array([("a", 1)], dtype=[("name", "U3"), ("number", "i4")]),
        np.array(5),
        np.empty((0, 2)),
    ],
    ids=["dense", "fortran", "strided", "structured", "scalar", "empty"],
)
def test_an_array_is_a_read_only_view(array: np.ndarray[Any, Any]) -> None:
    """An array has its value, dtype and shape, its memory is the sealed file, and writing to it raises ValueError."""
    shared = numapin.share({"a": array})["a"]
    assert (shared.dtype, shared.shape) == (array.dtype, array.shape)
    assert np.array_equal(shared, array)
    assert not shared.flags.writeable
    assert shared.size == 0 or is_in_file(shared.ctypes.data)


def test_an_array_in_a_mapped_file_is_shared(tmp_path: Path) -> None:
    """An array that numpy maps from a file, alone or in an object, comes back as any other array."""
    np.save(tmp_path / "a.npy", np.arange(5000))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for shared, original in ((numapin.share(mapped), mapped), (numapin.share([mapped[::2]])[0], mapped[::2])):
        assert type(shared) is np.ndarray
        assert np.array_equal(shared, original)
        assert is_in_file(shared.ctypes.data)


def test_bytes_are_a_read_only_view() -> None:
    """Bytes on their own come back as a memoryview; a short text and a number come back as they are."""
    shared = numapin.share(b"abc")
    assert (bytes(shared), shared.readonly) == (b"abc", True)
    assert bytes(numapin.share(memoryview(b"abcd")[::2])) == b"ac"
    assert (numapin.share("text"), numapin.share(7), numapin.share(None)) == ("text", 7, None)


class Images:
    def __init__(self) -> None:
        self.samples = [(f"{number}.jpg", number) for number in range(20_000)]
        self.imgs = self.samples
        self.classes = ["a", "b"]


def test_long_lists_in_an_object_are_shared_once() -> None:
    """An object comes back with its type; its long list is shared, and written once although it has two names."""
    before = opened_files().keys()
    images = numapin.share(Images)
    (size,) = [path.stat().st_size for number, path in opened_files().items() if number not in before]
    assert isinstance(images, Images)
    assert images.classes == ["a", "b"]
    assert list(images.samples) == list(images.imgs) == Images().samples
    assert size < 20_000 * 40  # bytes: a tuple of 9 characters and a number takes 32


def test_an_arrow_table_is_a_view() -> None:
    """A table has its value; its buffers are in the sealed file."""
    arrow = pytest.importorskip("pyarrow", reason="no pyarrow; type: pip install pyarrow")
    table = arrow.table({"number": list(range(5000)), "text": [str(number) for number in range(5000)]})
    shared = numapin.share({"t": table})["t"]
    assert shared.equals(table)
    buffers = [buffer for column in shared.columns for chunk in column.chunks for buffer in chunk.buffers() if buffer]
    assert buffers
    assert all(is_in_file(buffer.address) for buffer in buffers)


def test_long_entries_are_not_all_copied_at_once() -> None:
    """Writing a list takes memory for some of its entries, not for another list."""
    entries = [bytes(1 << 18) for _ in range(400)]  # 100 MiB
    tracemalloc.start()
    shared = numapin.share(entries)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(shared[-1]) == 1 << 18
    assert peak < 50 << 20


def test_memory_goes_with_the_last_view() -> None:
    """The file is closed once neither the data nor a view of it is left; a view keeps it."""
    before = opened_files().keys()
    shared = numapin.share({"t": torch.zeros(1000)})
    tensor = shared["t"][3:]
    del shared
    assert torch.equal(tensor, torch.zeros(997))
    assert len(opened_files().keys() - before) == 1
    del tensor
    assert opened_files().keys() == before


def test_a_copy_is_the_same_memory() -> None:
    """A deep copy, as frameworks make of data sets, has the same memory, which cannot change anyway."""
    shared = numapin.share({"a": [1] * 2000})
    assert copy.deepcopy(shared) is shared
    assert copy.deepcopy({"x": shared["a"]})["x"][5] == 1


def test_entries_of_a_dict_are_read_in_order() -> None:
    """Iteration over items and values looks up no key: equal keys would otherwise need to be found."""
    shared = numapin.share({Unequal("a"): 1, Unequal("b"): 2})
    assert [value for _key, value in shared.items()] == list(shared.values()) == [1, 2]


class Unequal(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return False


def test_errors_of_the_data_are_kept() -> None:
    """An OSError that an object raises is not taken for a lack of memory."""
    with pytest.raises(FileNotFoundError):
        numapin.share(lambda: Reduced(Raise(FileNotFoundError)))


def test_the_seal_waits_for_a_page_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel refuses to seal the memory for a moment, the call waits."""
    call, refusals = fcntl.fcntl, [OSError(errno.EBUSY, "busy")] * 3

    def refuse(fd: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_ADD_SEALS and refusals:
            raise refusals.pop()
        return call(fd, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert list(numapin.share([1])) == [1]
    assert not refusals


@pytest.mark.parametrize(
    ("placement", "limit_bytes"),
    [("interleave", resource.RLIM_INFINITY), ("per-node", resource.RLIM_INFINITY), ("per-node", 1 << 30)],
)
def test_pages_get_the_policy_of_their_nodes(placement: str, limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nodes to choose from, the file has a policy; pages that are elsewhere are a warning.

    `ulimit -f` may be less than the machine's memory: what can be written gets the policy all the same.
    """
    monkeypatch.setattr("numapin.sharing.call.usable_nodes", lambda: CpuSet({0, 1000}))
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (limit_bytes, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shared = numapin.share([np.ones(1 << 20)], placement=placement)
    assert shared[0].sum() == 1 << 20
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    policies = {line.split()[1] for line in maps if "numapin-share" in line}
    if placement == "per-node":  # on this process's own node
        assert (seen, "prefer:0" in policies) == ([], True)
    else:  # the kernel passes over nodes that do not exist
        assert "interleave:0" in policies
        assert "not spread evenly over nodes 0,1000: 2049 on node 0" in str(seen[0].message)


def test_programs_do_not_inherit_the_memory() -> None:
    """Python 3.11 lets received descriptors be inherited, unless it is told otherwise."""
    descriptor = os.memfd_create("shared")
    os.truncate(descriptor, mmap.PAGESIZE)
    os.set_inheritable(descriptor, True)
    assert not os.get_inheritable(sealed.Sealed(descriptor).fd)


def map_one() -> sealed.Sealed:
    descriptor = os.memfd_create("shared")
    os.truncate(descriptor, mmap.PAGESIZE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return sealed.Sealed(descriptor)  # Python's mmap opens another one


def store_long_bytes() -> Any:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return numapin.share([bytes(100_000)])


@pytest.mark.parametrize(
    ("call", "kind", "problem"),
    [
        (map_one, resource.RLIMIT_NOFILE, r"cannot be mapped: Too many open files.*hint: .*ulimit -n"),
        (store_long_bytes, resource.RLIMIT_FSIZE, r"cannot be stored: File too large.*hint: .*ulimit -a"),
    ],
)
def test_a_limit_that_is_too_low_is_named(call: Callable[[], object], kind: int, problem: str) -> None:
    """The error does not speak of memory where files are limited."""
    limits = resource.getrlimit(kind)
    try:
        with pytest.raises(numapin.NumapinError, match=f"(?s){problem}"):
            call()
    finally:
        resource.setrlimit(kind, limits)


def test_a_worker_sends_views() -> None:
    """Items that are views of shared data arrive as copies, which do not contain the rest of the data."""
    rows = np.arange(4 << 16).reshape(4, -1)
    shared = numapin.share({"tensor": torch.from_numpy(rows), "array": rows})
    views = Made(lambda index: (shared["tensor"][index], shared["array"][index]), 4)
    loader = DataLoader(views, batch_size=None, collate_fn=tuple, num_workers=1)
    for index, (tensor, array) in enumerate(loader):
        assert np.array_equal(array, rows[index])
        assert torch.equal(tensor, torch.from_numpy(rows[index]))
        assert tensor.untyped_storage().nbytes() == rows[index].nbytes


class Particular:
    def __init__(self) -> None:
        self.numbers = list(range(5000))

    def __getstate__(self) -> list[int]:
        return self.numbers

    def __setstate__(self, state: list[int]) -> None:
        assert type(state) is list
        self.numbers = state


def test_states_of_objects_keep_their_type() -> None:
    """Objects that are restored from a long list or dict get one: arrays of objects, and classes that insist on it."""
    mixed = np.array([None, "text", 3] * 1000, dtype=object)
    records = np.array([("a", None)] * 2000, dtype=[("name", "U3"), ("value", "O")])
    many = Point(1, 2), Images()
    many[1].__dict__.update((f"a{number}", number) for number in range(2000))
    shared = numapin.share({"mixed": mixed, "records": records, "particular": Particular(), "many": many})
    assert np.array_equal(shared["mixed"], mixed)
    assert np.array_equal(shared["records"], records)
    assert shared["particular"].numbers == list(range(5000))
    assert shared["many"][1].a1999 == 1999
    assert repr(shared["many"][1].samples) == "<numapin.share: list of 20000 entries>"


def endless() -> list[object]:
    entries: list[object] = [None] * 2000
    entries[0] = entries
    return entries


CALLS = Made(lambda _: numapin.share([1]))
REFUSED: dict[str, tuple[Any, str, str]] = {
    "a long text": (lambda: numapin.share("x" * (1 << 20)), "a text of 1048576 characters", "encoded bytes"),
    "keys": (lambda: numapin.share({object(): 1}), "a key is of type object", "text or numbers"),
    "NaN as key": (lambda: numapin.share({math.nan: 1}), "a key is NaN", "text or numbers"),
    "a generator": (lambda: numapin.share(n for n in range(3)), "TypeError: cannot pickle 'gen", "can be pickled"),
    "a function": (lambda: numapin.share([lambda: 1]), "AttributeError: ", "can be pickled"),
    "a cycle": (lambda: numapin.share(endless()), "RecursionError: ", "can be pickled"),
    "a device": (lambda: numapin.share([torch.empty(2, device="meta")]), "its device is meta", r"tensor\.cpu\(\)"),
    "nested": (lambda: numapin.share(torch.nested.nested_tensor([torch.ones(2)])), "its layout nested", r"unbind\(\)"),
    "a placement": (lambda: numapin.share([1], placement="near"), "'near' is unknown", "interleave, per-node"),
    "a pickle": (lambda: pickle.dumps(numapin.share([1])), "only for a new process", "before the process starts"),
    "a worker": (lambda: list(DataLoader(CALLS, num_workers=1)), "in a DataLoader worker", "call it in the rank"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_remedy(name: str) -> None:
    """What cannot be shared is a UsageError that says what was seen and what to do, and leaves no descriptor behind."""
    call, message, hint = REFUSED[name]
    before = opened_files().keys()
    with pytest.raises(numapin.UsageError, match=rf"(?s){message}.*hint: .*{hint}"):
        call()
    assert opened_files().keys() == before


def is_in_file(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "memfd:numapin-share" in line
    return False
