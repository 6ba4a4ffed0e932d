"""Page-locked memory for user code: without CUDA on this machine's own kernel, and with the stand-in driver."""

from __future__ import annotations

import gc
import mmap
import os
import random
import threading
import time
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory as pinned_by_torch

from numapin import pinned
from numapin.errors import MachineError, NumapinError, UsageError
from tests.contract.datasets import Raise
from tests.data.loopback import ANYWHERE, in_forked_child, interrupted
from tests.needs import TORCH_VERSION
from tests.unit.data.seam import (
    PINNED,
    CpuSet,
    CudaRefused,
    Driver,
    LockRoom,
    Placement,
    Reclaimer,
    cuda,
    pinning,
    read_room,
    reclaimer,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def gpu(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    pid = os.getpid()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: os.getpid() == pid)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake_cuda


def ours() -> Reclaimer:
    return reclaimer(cast("Driver", cuda.driver()))


def num_idle_bytes() -> int:
    return ours().idle.num_bytes


def become_idle(num_bytes: int) -> None:
    """Wait until this much waits for reuse."""
    assert wait_until(lambda: num_idle_bytes() == num_bytes, limit_s=60)


class TestEmpty:
    @pytest.mark.parametrize("shape", [3, [5], (), torch.Size([1, 2, 3]), (4, 0)], ids=str)
    def test_it_is_as_torch_makes_it(self, shape: Any) -> None:
        """Shape, dtype, strides and storage size are torch's, and all of it can be written."""
        for dtype in (None, torch.bool, torch.bfloat16, torch.complex128):
            ours, theirs = pinned.empty(shape, dtype), torch.empty(shape, dtype=dtype)
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            assert torch.equal(ours.fill_(1), theirs.fill_(1))

    @pytest.mark.parametrize(
        ("shape", "node", "problem"),
        [
            (-1, None, "has a negative size"),
            ((2, -3), None, "has a negative size"),
            (1, 1000, "node 1000 does not"),
            (1 << 60, None, f"{1 << 60} bytes could not be allocated"),
            (1 << 70, None, f"{1 << 70} bytes could not be allocated"),
        ],
    )
    def test_what_cannot_be(self, shape: Any, node: int | None, problem: str) -> None:
        """Wrong arguments are refused before anything is mapped; if there is no memory, the hint says where to look."""
        with pytest.raises(NumapinError, match=problem) as caught:
            pinned.empty(shape, torch.uint8, node=node)
        is_wrong = isinstance(caught.value, UsageError)
        assert is_wrong or caught.value.hint == "see what may be locked here: numapin.pinned.budget()"
        assert is_wrong == ("allocated" not in problem)


@pytest.fixture
def all_returned(gpu: FakeCuda) -> Iterator[None]:
    """Check afterwards that all memory is idle once nothing refers to it, and that `trim` releases it."""
    gc.collect()
    assert wait_until(lambda: PINNED.total == num_idle_bytes(), limit_s=60)  # slots of earlier tests are released late
    before = PINNED.total
    yield
    gpu.set(hold_events=0, limit_bytes=-1)
    gc.collect()
    assert wait_until(lambda: gpu.registered_bytes() == num_idle_bytes(), limit_s=60)
    num_bytes = num_idle_bytes()
    assert PINNED.total == before + num_bytes
    assert pinned.trim() == num_bytes
    assert (gpu.registered_bytes(), num_idle_bytes(), PINNED.total) == (0, 0, before)


@pytest.mark.usefixtures("all_returned")
class TestLocked:
    def test_it_is_registered_and_counted(self, gpu: FakeCuda) -> None:
        """It is in use while a view or an array lives, and idle afterwards, without a further call."""
        before = PINNED.total
        assert pinned.empty((0, 5)).numel() == gpu.registered_bytes() == 0  # needs no memory
        array = pinned.empty((4, 100), torch.uint8)[2].fill_(7).numpy()
        gc.collect()
        time.sleep(0.05)
        assert (gpu.registered_bytes(), PINNED.total, array.sum()) == (PAGE, before + PAGE, 700)
        assert num_idle_bytes() == 0
        del array
        become_idle(PAGE)

    def test_it_waits_for_the_device(self, gpu: FakeCuda) -> None:
        """A copy that is under way when the tensor is freed keeps the memory until an event has passed."""
        gpu.hold_events()
        tensor = pinned.empty(100, torch.uint8)
        address = tensor.data_ptr()
        del tensor
        assert wait_until(lambda: gpu.get("recorded") > 0, limit_s=60)
        second = pinned.empty(1, torch.uint8)
        assert (second.data_ptr() != address, pinned.trim(), gpu.registered_bytes()) == (True, 0, 2 * PAGE)
        gpu.pass_events()
        become_idle(PAGE)
        assert pinned.empty(1, torch.uint8).data_ptr() == address
        del second

    def test_where_no_thread_can_be_started(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is freed waits for the next request, or for `trim`: a loop of allocations does not grow."""
        monkeypatch.setattr(threading.Thread, "start", Raise(RuntimeError, ("can't start new thread",)))
        alone = Reclaimer(cast("Driver", cuda.driver()))
        monkeypatch.setattr(pinned, "reclaimer", lambda _driver: alone)
        for _ in range(10):
            pinned.empty(PAGE, torch.uint8)
            assert gpu.registered_bytes() == PAGE
        assert (pinned.trim(), gpu.registered_bytes()) == (PAGE, 0)

    def test_what_the_driver_refuses_for_a_while(self, gpu: FakeCuda) -> None:
        """The thread retries, and does not use up events."""
        tensor = pinned.empty(100, torch.uint8)
        gpu.set(active=0b11, query_fails=700)
        del tensor
        assert wait_until(lambda: gpu.get("recorded") > 0, limit_s=60)
        time.sleep(0.05)
        assert num_idle_bytes() == 0
        gpu.set(query_fails=0)
        become_idle(PAGE)
        assert gpu.get("created") == 2

    def test_a_refused_registration(self, gpu: FakeCuda) -> None:
        """The error has the driver's message, and nothing leaks."""
        gpu.refuse_registration(above_bytes=2 * PAGE)
        before = PINNED.total
        problem = rf"{3 * PAGE} bytes could not be page-locked: .*OUT_OF_MEMORY"
        with pytest.raises(NumapinError, match=problem) as caught:
            pinned.empty(2 * PAGE + 1, torch.uint8)
        assert caught.value.hint == "see what may be locked here: numapin.pinned.budget()"
        assert (gpu.registered_bytes(), PINNED.total) == (0, before)
        assert pinned.empty(2 * PAGE, torch.uint8).numel() == 2 * PAGE

    def test_a_forked_child_gives_nothing_back(self, gpu: FakeCuda) -> None:
        """A tensor that is freed in a child still belongs to the parent."""
        kept, queue = [pinned.empty(100, torch.uint8).fill_(5)], ours()._dead

        def drop() -> bool:
            kept.clear()
            gc.collect()
            return queue.empty() and gpu.registered_bytes() == PAGE

        assert in_forked_child(drop)
        assert (gpu.registered_bytes(), int(kept[0].sum())) == (PAGE, 500)


def freed(num_bytes: int, **options: Any) -> int:
    before = num_idle_bytes()
    tensor = pinned.empty(num_bytes, torch.uint8, **options)
    address = tensor.data_ptr()
    del tensor
    assert wait_until(lambda: num_idle_bytes() >= before + num_bytes, limit_s=60)
    return address


@pytest.mark.usefixtures("all_returned")
class TestReuse:
    @pytest.mark.parametrize(
        ("num_pages", "num_asked", "is_reused"), [(9, 9, True), (9, 5, True), (9, 4, False), (9, 10, False)]
    )
    def test_sizes(self, gpu: FakeCuda, num_pages: int, num_asked: int, *, is_reused: bool) -> None:
        """Memory serves what needs as much or up to half less, in whole pages; the storage has the size asked."""
        address = freed(num_pages * PAGE)
        tensor = pinned.empty(num_asked * PAGE - 100, torch.uint8)
        assert (tensor.data_ptr() == address) == is_reused
        assert tensor.untyped_storage().nbytes() == num_asked * PAGE - 100
        assert gpu.registered_bytes() == (num_pages if is_reused else num_pages + num_asked) * PAGE

    def test_the_best_fit_goes_first(self) -> None:
        """Of several, the smallest is used; of equal ones, that which came back last: its pages are in a cache."""
        kept = [pinned.empty(size * PAGE, torch.uint8) for size in (18, 17, 17)]
        addresses = [tensor.data_ptr() for tensor in kept]
        for num_idle in (18, 35, 52):
            del kept[0]
            become_idle(num_idle * PAGE)
        assert [pinned.empty(17 * PAGE, torch.uint8).data_ptr()] == addresses[2:]

    def test_sizes_that_vary(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of blocks that do not fit the next request, no more wait than were ever in use; few are made."""
        sizes = random.Random(0)  # noqa: S311
        kept, most, made, lock = list[torch.Tensor](), 0, list[int](), pinned._lock

        def noted(*arguments: Any) -> Any:
            made.append(arguments[2])
            return lock(*arguments)

        monkeypatch.setattr(pinned, "_lock", noted)
        for _ in range(100):
            kept = [*kept[-3:], pinned.empty(sizes.randrange(24, 64) * PAGE, torch.uint8)]
            most = max(most, gpu.registered_bytes())
        assert most <= 640 * PAGE  # the values that were in use at once took at most 252 pages
        assert len(made) <= 40
        kept.clear()

    def test_memory_elsewhere_is_not_reused(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory that the kernel put on another node is released, so that new memory may get the right node.

        The warning is at the line of the user's call.
        """
        monkeypatch.setattr(pinned, "_home", lambda *_: replace(ANYWHERE, nodes=CpuSet({0}), num_machine_nodes=2))
        monkeypatch.setattr(pinned, "place", lambda *_a, **_k: Placement(pages={0: 1, 1: 1}, shortfalls=("half",)))
        with pytest.warns(RuntimeWarning, match=r"numapin\.pinned: half") as caught:
            pinned.empty(2 * PAGE, torch.uint8)
        assert caught[0].filename == __file__
        assert wait_until(lambda: gpu.registered_bytes() == 0, limit_s=60)

    def test_nodes_are_kept_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory of one node never serves another one; that of the node does, whatever else is idle."""
        monkeypatch.setattr(pinned, "_home", lambda node, _device: replace(ANYWHERE, nodes=CpuSet({node})))
        first, second = freed(PAGE, node=0), freed(PAGE, node=1)
        assert first != second
        assert pinned.empty(PAGE, torch.uint8, node=1).data_ptr() == second
        assert pinned.empty(PAGE, torch.uint8, node=0).data_ptr() == first

    def test_idle_memory_makes_room(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """The longest idle memory is released as far as new memory exceeds the budget, and all if it is refused."""
        kept = [pinned.empty(num_pages * PAGE, torch.uint8) for num_pages in (9, 5, 3)]
        for num_idle in (9, 14, 17):
            del kept[0]
            become_idle(num_idle * PAGE)
        room = LockRoom(num_bytes=12 * PAGE, reason="")
        monkeypatch.setattr(pinned, "read_room", lambda *_a, **_k: room)
        tensor = pinned.empty(20 * PAGE, torch.uint8)  # 8 more than there is room
        assert (num_idle_bytes(), gpu.registered_bytes()) == (8 * PAGE, 28 * PAGE)
        gpu.refuse_registration(above_bytes=32 * PAGE)
        other = pinned.empty(12 * PAGE, torch.uint8)
        assert (num_idle_bytes(), gpu.registered_bytes()) == (0, 32 * PAGE)
        del tensor, other

    @pytest.mark.parametrize("is_of_another", [False, True])
    def test_it_goes_back_after_a_while(
        self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, is_of_another: bool
    ) -> None:
        """Our thread releases what has been idle for long, without a call, though another thread took it in."""
        clock = [0.0]
        monkeypatch.setattr(pinning, "IDLE_S", 0.5)  # it looks every 0.1 s
        monkeypatch.setattr(pinning, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        other = pinning.Reclaimer(cast("Driver", cuda.driver()))
        address = freed(PAGE)
        if is_of_another:
            (block,) = ours().idle.drop()
            assert other.idle.add(replace(block, num_forks=other.idle.num_forks))
        time.sleep(0.2)
        assert gpu.is_registered(address)
        clock[0] = 0.6
        assert wait_until(lambda: not gpu.is_registered(address), limit_s=60)

    @pytest.mark.parametrize(("place", "name", "num_pages"), [(weakref, "finalize", 1), (PINNED, "add", 0)])
    def test_ctrl_c_while_it_is_handed_out(
        self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, place: object, name: str, num_pages: int
    ) -> None:
        """A block waits for reuse again; memory that is about to be unmapped is not registered any more."""
        with monkeypatch.context() as patch:
            patch.setattr(place, name, Raise(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                pinned.empty(PAGE, torch.uint8)
        become_idle(num_pages * PAGE)
        assert gpu.registered_bytes() == num_pages * PAGE

    def test_ctrl_c_at_any_call(self, gpu: FakeCuda) -> None:
        """Wherever it comes while a block is looked for, the block waits for reuse again, and no lock stays locked."""
        release_unused = ours().release_unused
        freed(PAGE)
        tensor, num_passed = None, 0
        while tensor is None:
            try:
                with interrupted(num_passed, pinning.__file__):
                    tensor = pinned.empty(PAGE, torch.uint8)
            except KeyboardInterrupt:
                num_passed += 1
                other = threading.Thread(target=release_unused, daemon=True)
                other.start()
                other.join(60)
                assert not other.is_alive()
                become_idle(PAGE)
        assert num_passed > 3
        assert gpu.registered_bytes() == PAGE

    def test_what_the_driver_does_not_release(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """It stays pinned and counted, and `trim` does not claim its bytes; the next one tries again."""
        before = PINNED.total
        freed(PAGE)
        with monkeypatch.context() as patch:
            patch.setattr(cuda.driver(), "unregister", Raise(CudaRefused, ("it failed",)))
            assert pinned.trim() == 0
            assert (gpu.registered_bytes(), PINNED.total) == (PAGE, before + PAGE)
        pinned.trim()
        assert (gpu.registered_bytes(), PINNED.total) == (0, before)

    def test_ctrl_c_while_it_is_released(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the driver has released already does not keep the others."""
        driver = cast("Driver", cuda.driver())
        before, unregister = PINNED.total, driver.unregister

        def interrupted(device: int, address: int) -> None:
            unregister(device, address)
            raise KeyboardInterrupt

        freed(PAGE)
        freed(3 * PAGE)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "unregister", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pinned.trim()
        pinned.trim()
        assert (gpu.registered_bytes(), PINNED.total) == (0, before)

    def test_ctrl_c_while_it_is_kept(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """A block that is not in its place for reuse is released."""
        tensor, queue = pinned.empty(PAGE, torch.uint8), ours()._dead
        with monkeypatch.context() as patch:
            patch.setattr(pinning, "insort_left", Raise(KeyboardInterrupt))
            with ours()._exit_lock.lock:  # so that the thread does not take it
                del tensor
                with pytest.raises(KeyboardInterrupt):
                    ours().idle.add(queue.get())
        assert pinned.empty(PAGE, torch.uint8) is not None
        assert pinned.trim() >= PAGE
        assert gpu.registered_bytes() == 0

    def test_one_thread_at_a_time(self, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever looks for a block, gives one back or releases some has the lock."""
        idle, lock = pinning.IdleBlocks, ours()._exit_lock.lock
        were_locked = set()

        def watch(name: str, then: Any) -> None:
            def watched(*args: Any, **options: Any) -> Any:
                were_locked.add((name, lock.locked()))
                return then(*args, **options)

            monkeypatch.setattr(idle, name, watched)

        for name in ("add", "take", "drop"):
            watch(name, getattr(idle, name))
        freed(PAGE)
        del gpu
        assert pinned.empty(PAGE, torch.uint8) is not None
        pinned.trim()
        assert were_locked == {("add", True), ("take", True), ("drop", True)}

    def test_the_budget_has_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Idle bytes are part of the pinned ones."""
        monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)
        before = PINNED.total
        freed(3 * PAGE)
        kept = pinned.empty(PAGE, torch.uint8)
        budget = pinned.budget()
        assert (budget.pinned_bytes, budget.idle_bytes) == (before + 4 * PAGE, 3 * PAGE)
        del kept

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_child_keeps_what_it_inherits(self, gpu: FakeCuda) -> None:
        """Memory in use during a fork is not reused: the child may read it. Idle memory is not mapped in the child."""
        idle, tensor = freed(3 * PAGE), pinned.empty(PAGE, torch.uint8).fill_(5)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(writer)  # if this test fails, the read ends with the parent
            os.read(reader, 1)
            is_mapped = any(line.startswith(f"{idle:x}-") for line in Path("/proc/self/maps").read_text().splitlines())
            os._exit(0 if int(tensor.sum()) == 5 * PAGE and not is_mapped else 1)
        del tensor
        assert wait_until(lambda: gpu.registered_bytes() == 3 * PAGE, limit_s=60)
        other = pinned.empty(PAGE, torch.uint8).fill_(6)
        os.write(writer, b"1")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for end in (reader, writer):
            os.close(end)
        del other


def test_an_old_driver_waits_for_the_device(old_fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before R555 no event covers a context, so the devices are synchronized before memory is unlocked."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: seen.append((device, old_fake_cuda.registered_bytes()))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    pinned.empty(100, torch.uint8)
    become_idle(PAGE)
    assert seen == [(0, PAGE)]


@pytest.mark.usefixtures("gpu")
def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch has a GPU and its library cannot be loaded, that is an error."""
    monkeypatch.setattr(pinned, "driver", lambda: None)
    with pytest.raises(NumapinError, match=r"libcuda\.so\.1 cannot be used"):
        pinned.empty(1)


@dataclass(frozen=True)
class Leaf:
    value: int

    def pin_memory(self) -> Leaf:
        return Leaf(self.value + 100)


Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - an untyped one is what users have


class Named(dict[str, Any]):
    label = "none"


class Stubborn(UserList[Any]):
    __setitem__ = Raise(TypeError)


def _named() -> Named:
    named = Named(a=Leaf(1))
    named.label = "batch"
    return named


class TestPin:
    @pytest.mark.parametrize(
        "data",
        [
            Leaf(1),
            [Leaf(1), Leaf(2), "text", b"bytes", None, 3, 4.0],
            (Leaf(1), [Leaf(2), (Leaf(3),)]),
            {"a": Leaf(1), "b": {"c": [Leaf(2)]}},
            Point(Leaf(1), y=Leaf(2)),
            OrderedDict(b=Leaf(1), a=Leaf(2)),
            defaultdict(list, a=[Leaf(1)]),
            MappingProxyType({"a": Leaf(1)}),
            UserDict({"a": Leaf(1)}),
            UserList([Leaf(1)]),
            Stubborn([Leaf(1)]),
            _named(),
            range(3),
            torch.Size([1, 2]),
            "text",
            {1, 2},
            np.arange(3),
        ],
        ids=lambda data: type(data).__name__,
    )
    def test_containers_are_as_torch_leaves_them(self, data: Any) -> None:
        """Types and values are the same as with torch's own function."""
        ours, theirs = pinned.pin(data), pinned_by_torch(data)
        if TORCH_VERSION < (2, 10) and isinstance(data, tuple) and type(theirs) is list:
            assert type(ours) is type(data)  # torch 2.9 made lists of tuples; numapin does as later ones do
            return
        assert type(ours) is type(theirs)
        assert np.array_equal(ours, theirs) if isinstance(data, np.ndarray) else ours == theirs
        assert getattr(ours, "label", None) == getattr(theirs, "label", None)
        assert getattr(ours, "default_factory", None) is getattr(theirs, "default_factory", None)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
            torch.arange(10)[::2],
            torch.arange(3).expand(4, 3),
            torch.tensor(5.0),
            torch.empty(0, 3),
            torch.tensor([1 + 2j]).conj(),
        ],
        ids=str,
    )
    def test_tensors_are_copied(self, tensor: torch.Tensor) -> None:
        """Values, dtype and order in memory are kept, in another storage; a mutable container is copied, not filled."""
        data: Any = [tensor, {"a": tensor}]
        copy = pinned.pin(data)[0]
        assert data[0] is data[1]["a"] is tensor
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.stride() == torch.empty_like(tensor).stride()
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()

    def test_errors_of_objects_come_through(self) -> None:
        """A TypeError inside a `pin_memory` method is not mistaken for the container's."""
        broken = SimpleNamespace(pin_memory=Raise(TypeError, ("mine",)))
        with pytest.raises(TypeError, match="mine"):
            pinned.pin([broken])


def test_where_any_cpu_tensor_is() -> None:
    """It works for torch's own memory, of views as a whole; pages that were never touched are on no node."""
    tensor = pinned.empty((4, PAGE), torch.uint8, node=0)
    assert pinned.where(tensor[1]) == pinned.where(tensor) == {0: 4}
    assert pinned.where(torch.empty(0)) == {}
    num_pages = (64 << 20) // PAGE
    pages = pinned.where(torch.empty(64 << 20, dtype=torch.uint8))  # memory that was somebody's before, perhaps
    assert sum(pages.values()) in (num_pages, num_pages + 1)
    untouched = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)
    assert pinned.where(untouched) == {None: num_pages}
    untouched[0] = 1
    touched = pinned.where(untouched)
    assert 0 < num_pages - touched[None] < num_pages
    assert sum(touched.values()) == num_pages


@pytest.mark.parametrize(
    ("tensor", "seen"),
    [(torch.empty(1, device="meta"), "device is meta"), (torch.eye(2).to_sparse(), "torch.sparse_coo")],
)
def test_where_refuses_other_tensors(tensor: torch.Tensor, seen: str) -> None:
    """The message says what was passed instead."""
    with pytest.raises(UsageError, match=seen):
        pinned.where(tensor)


def test_where_under_a_kernel_that_does_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Docker's profile it is an error with the remedy."""
    monkeypatch.setattr(pinned, "find_pages", lambda *_args: None)
    with pytest.raises(MachineError, match="does not report the nodes of this tensor's 4 bytes") as caught:
        pinned.where(torch.zeros(1))
    assert "SYS_NICE" in caught.value.hint


GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def host(*, available: int = 100, free: int = 100, cached: int = 0, **files: str) -> dict[str, str]:
    """Return a machine of one node, sizes in GiB, and further files with "__" for "/"."""
    node = f"Node 0 MemFree: {free << 20} kB\nNode 0 Active(file): 0 kB\nNode 0 Inactive(file): {cached << 20} kB\n"
    return {
        "proc/meminfo": f"MemTotal: 999 kB\nMemAvailable:   {available << 20} kB\n",
        "sys/devices/system/node/online": "0\n",
        "sys/devices/system/node/node0/meminfo": node,
        **{path.replace("__", "/"): text for path, text in files.items()},
    }


V2 = {
    "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
    "proc/self/cgroup": "0::/pod/job\n",
    "sys/fs/cgroup/pod/job/memory.max": "max\n",
    "sys/fs/cgroup/pod/job/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/pod/memory.max": f"{40 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{12 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {2 * GIB}\ntotal_inactive_file 5\n",
}
V1 = {
    "proc/mounts": "x /sys/fs/cgroup/memory cgroup rw,memory 0 0\nx /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n",
    # A container sees the host's path, and below its mount only its own cgroup.
    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{10 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
}


@pytest.mark.parametrize(
    ("files", "gib", "why"),
    [
        (host(available=80), 40, "80.0 GiB available on the host"),
        (host(free=20, cached=10), 15, "30.0 GiB free on node 0"),
        ({**host(), **V2}, 15, "30.0 GiB left of the limit of sys/fs/cgroup/pod (40.0 GiB)"),
        ({**host(), **V1}, 3, "6.0 GiB left of the limit of sys/fs/cgroup/memory (10.0 GiB)"),
        ({**host(), **V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 50, "100.0 GiB"),
        ({**host(), **V2, "sys/fs/cgroup/pod/memory.current": f"{90 * GIB}"}, 0, "0.0 GiB left of the limit"),
        ({**host(available=8), **V2}, 4, "8.0 GiB available on the host"),
        ({}, None, "neither a memory limit nor"),
    ],
    ids=[*("host", "node", "cgroup 2", "cgroup 1", "no limit", "over the limit", "the tightest", "none")],
)
def test_the_budget_has_bounds(tmp_path: Path, files: dict[str, str], gib: int | None, why: str) -> None:
    """The tightest bound counts, at any level of the hierarchy, and is named; an unknown figure is no bound."""
    found = read_room(write(tmp_path, files), nodes=CpuSet({0}), num_ranks=1)
    assert found.num_bytes == (None if gib is None else gib * GIB)
    assert found.reason.startswith("50% of ") == (gib is not None)
    assert why in found.reason


def test_ranks_share_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ranks is the argument, else the launcher's. Without the node's figures, the host's count."""
    root, num_ranks = write(tmp_path, host(available=80)), list[int]()
    assert read_room(root, nodes=CpuSet({0}), num_ranks=8).num_bytes == 5 * GIB
    assert "divided" not in read_room(root, nodes=CpuSet({0}), num_ranks=1).reason
    room = read_room(root, nodes=CpuSet({0}), num_ranks=4)
    assert room.reason.endswith("divided among 4 ranks")
    (root / "sys/devices/system/node/node0/meminfo").unlink()
    assert read_room(root, nodes=CpuSet({0}), num_ranks=1).num_bytes == 40 * GIB

    def noted(*_: object, **options: Any) -> LockRoom:
        num_ranks.append(options["num_ranks"])
        return room

    monkeypatch.setattr(pinned, "read_room", noted)
    for local_world_size in ("4", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        pinned.budget()
    pinned.budget(num_ranks=3)
    assert num_ranks == [4, 1, 3]


def test_the_budget_reports_what_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our bytes and torch's are separate; None if this torch does not report them. Asking makes no context."""
    monkeypatch.setattr(torch.cuda, "current_device", None)
    limit_bytes = pinned.budget(num_ranks=1).limit_bytes  # of this machine
    assert limit_bytes is not None
    assert 0 < limit_bytes < os.sysconf("SC_PHYS_PAGES") * PAGE
    with pytest.raises(UsageError, match="node 1000 does not exist"):
        pinned.budget(node=1000)
    with pytest.raises(UsageError, match="num_ranks=0: a host has at least one rank"):
        pinned.budget(num_ranks=0)
    PINNED.add(4096)
    assert pinned.budget().pinned_bytes == PINNED.total
    PINNED.remove(4096)
    for stats, num_bytes in (
        ({}, 0),  # CUDA was not initialized
        ({"allocated_bytes.current": 5, "active_bytes.current": 3}, 5),
        ({"allocated_bytes.current": 3, "reserved_bytes.current": 5}, 5),
    ):
        monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda stats=stats: stats)
        assert pinned.budget().torch_pinned_bytes == num_bytes
    monkeypatch.delattr(torch.cuda, "host_memory_stats")
    assert pinned.budget().torch_pinned_bytes is None
