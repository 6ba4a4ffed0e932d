"""What a worker does beside the user's code: stacking samples into a batch's memory, limiting libraries' threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from numapin.errors import LibraryError, UsageError
from tests.contract.datasets import Raise
from tests.data.loopback import lent, loopback
from tests.unit.data.seam import (
    LARGE_BYTES,
    DataPath,
    Packer,
    PathOptions,
    Stacker,
    calls,
    limit_libraries,
    memory,
    num_worker_threads,
    path,
    threads,
)
from tests.waiting import wait_until

Stack: TypeAlias = "Callable[[list[torch.Tensor], int], torch.Tensor]"
needs_stores = pytest.mark.skipif(not memory.can_pass_caches(), reason="no C compiler when numapin was installed")
SAMPLE: Final = 1 << 18  # float32 elements: 1 MiB


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call past the caches appends its number of blocks."""
    calls: list[int] = []
    stack = memory.stack_past_caches

    def count(target: int, sources: list[int], num_bytes: int) -> None:
        calls.append(len(sources))
        stack(target, sources, num_bytes)

    monkeypatch.setattr(memory, "stack_past_caches", count)
    return calls


@needs_stores
class TestPastCaches:
    @given(
        count=st.integers(0, 4),
        num_bytes=st.integers(0, 400),
        target_at=st.integers(0, 70),
        source_at=st.integers(0, 70),
    )
    def test_every_byte_and_no_other(self, count: int, num_bytes: int, target_at: int, source_at: int) -> None:
        """It copies any length at any alignment, and leaves the bytes before and after unchanged."""
        sources = torch.randint(0, 256, (count, 500), dtype=torch.uint8)
        target = torch.full((2048,), 7, dtype=torch.uint8)
        addresses = [row.data_ptr() + source_at for row in sources]
        memory.stack_past_caches(target.data_ptr() + target_at, addresses, num_bytes)
        end = target_at + count * num_bytes
        assert torch.equal(target[target_at:end], sources[:, source_at : source_at + num_bytes].flatten())
        assert set(target[:target_at].tolist()) | set(target[end:].tolist()) == {7}

    def test_a_tensor_that_no_collate_stacked(self, past: list[int]) -> None:
        """Large tensors of a custom collate_fn are copied the same way, if a GPU reads them next, and no CPU."""
        passes = [Packer(None, worker=0, pins=n == 1, moves=n == 2).passes_caches for n in range(3)]
        assert passes == [False, True, True]
        with loopback() as loop:
            loop.packers[0].passes_caches = True
            batch = torch.randn(LARGE_BYTES // 4 + 3)
            assert torch.equal(lent(loop, batch[1:]), batch[1:])
            assert past == [1]


class TestWithout:
    @pytest.fixture(autouse=True)
    def no_stores(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        name = "numapin_stack_past_caches"
        monkeypatch.setattr(calls, "_STORES", "/nowhere/libstores.so")
        monkeypatch.setitem(calls._SIGNATURES, name, ("/nowhere/libstores.so", *calls._SIGNATURES[name][1:]))
        monkeypatch.setattr(calls, "_loaded", {})
        memory.can_pass_caches.cache_clear()
        yield
        memory.can_pass_caches.cache_clear()

    def test_the_loader_says_so(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """It warns once, if batches go to a GPU; `strict` does not apply. No worker uses the library then.

        The hint of a call's error says what to install.
        """
        assert not memory.can_pass_caches()
        assert not Packer(None, worker=0, pins=True, moves=True).passes_caches
        with pytest.raises(LibraryError, match=r"libstores\.so cannot be used") as caught:
            memory.stack_past_caches(0, [], 0)
        assert "gcc" in str(caught.value.hint)
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        loader: DataLoader[int] = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]
        path = DataPath(PathOptions(strict=True))
        lane = path.lane(loader, pins=False)
        for pins in (False, True, True):
            path.worker_start(lane, loader, pins=pins)
        assert capsys.readouterr().err.count("libstores.so cannot be loaded") == 1
        lane.end(workers_are_gone=True)
        path.close()


class TestStacking:
    @pytest.fixture(params=[False, pytest.param(True, marks=needs_stores)], ids=["through-caches", "past-caches"])
    def stack(self, request: pytest.FixtureRequest, past: list[int]) -> Stack:
        packer = Packer(None, worker=0, pins=False, moves=False)
        packer.passes_caches = request.param

        def stack(samples: list[torch.Tensor], copy_threads: int) -> torch.Tensor:
            out = torch.full((len(samples), *samples[0].shape), 7, dtype=samples[0].dtype)
            past.clear()
            Stacker(packer, num_threads=copy_threads).stack(samples, out)
            are_blocks = all(each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in samples)
            assert sum(past) == (len(samples) if packer.passes_caches and are_blocks else 0)
            return out

        return stack

    @pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 9])
    def test_any_number_of_samples_and_threads(self, stack: Stack, num_samples: int) -> None:
        """It works for every dtype, even with fewer samples than threads: one large sample is a batch."""
        for copy_threads, dtype in enumerate((torch.uint8, torch.float16, torch.float32, torch.complex64), start=1):
            count = LARGE_BYTES // dtype.itemsize // num_samples + 5
            samples = [torch.randint(0, 2, (count,)).to(dtype) for _ in range(num_samples)]
            assert torch.equal(stack(samples, copy_threads), torch.stack(samples))

    @pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 4), (4, 4), (6, 2), (8, 2), (12, 1), (40, 1)])
    def test_no_more_threads_than_cpus(
        self, monkeypatch: pytest.MonkeyPatch, num_workers: int, num_threads: int
    ) -> None:
        """All workers together copy on as many threads as the rank has CPUs, and each on four at most."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
        monkeypatch.setattr(os, "cpu_count", lambda: 32)
        assert path._num_copy_threads(num_workers, {"LOCAL_WORLD_SIZE": "2"}) == num_threads

    @pytest.mark.parametrize(
        "change",
        [
            lambda sample: sample.view(512, 512).T.flatten(),
            lambda sample: sample.view(512, 512).T,
            lambda sample: torch.view_as_complex(sample.view(-1, 2)).conj(),
            lambda sample: torch.view_as_complex(sample.view(-1, 2)).conj().imag,
            lambda sample: sample[::2],
            lambda sample: sample[:1].expand(SAMPLE),
        ],
        ids=["a-copy", "transposed", "conjugated", "negated", "every-second", "expanded"],
    )
    def test_samples_that_are_no_blocks(self, stack: Stack, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Their elements are stacked, not their bytes, even if only some samples are not contiguous."""
        samples = [torch.randn(SAMPLE) for _ in range(16)]
        odd = [change(sample) for sample in samples]
        assert torch.equal(stack(odd, 2), torch.stack(odd))
        mixed = [sample if number % 3 else sample.clone() for number, sample in enumerate(odd)]
        assert torch.equal(stack(mixed, 2), torch.stack(mixed))

    def test_work_that_got_no_thread_is_not_done_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The worker's own thread does it from then on, and no other writes to a batch that may have been sent."""
        stacker = Stacker(Packer(None, worker=0, pins=False, moves=False), num_threads=2)
        queued, samples = stacker._pool._work_queue, [torch.randn(SAMPLE) for _ in range(6)]
        stacker._pool.submit(wait_until, lambda: queued.qsize() > 0, limit_s=60)  # its thread is not idle before
        monkeypatch.setattr(threading.Thread, "start", Raise(RuntimeError, ("can't start new thread",)))
        for _ in range(2):
            assert torch.equal(stacker.stack(samples, torch.empty(6, SAMPLE)), torch.stack(samples))
            assert not any(thread.is_alive() for thread in stacker._pool._threads)


@pytest.mark.parametrize(
    ("wanted", "environ", "expected"),
    [
        (None, {}, 1),
        (None, {"NUMAPIN_WORKER_THREADS": "4"}, 4),
        (None, {"NUMAPIN_WORKER_THREADS": "0"}, 0),
        (3, {"NUMAPIN_WORKER_THREADS": "x"}, 3),
        (0, {}, 0),
    ],
)
def test_the_number(wanted: int | None, environ: dict[str, str], expected: int) -> None:
    """The argument comes first, then the environment variable, which must be a number; otherwise one."""
    assert num_worker_threads(wanted, environ) == expected
    for text in ("", "two", "-1", "1.5", "\u0662"):
        with pytest.raises(UsageError, match=r"NUMAPIN_WORKER_THREADS=.* is not a number of threads") as caught:
            num_worker_threads(None, {"NUMAPIN_WORKER_THREADS": text})
        assert caught.value.hint == "use e.g. NUMAPIN_WORKER_THREADS=1"


def test_opencv_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV is called if it is loaded; torch keeps its number; 0 changes nothing."""
    asked: list[int] = []
    environ = dict(os.environ)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setNumThreads=asked.append))
    monkeypatch.setattr(threads, "_loaded", tuple)  # this process's own libraries are not called
    torchs = torch.get_num_threads()
    limit_libraries(0)
    assert (asked, environ) == ([], dict(os.environ))
    limit_libraries(3)
    assert (asked, torch.get_num_threads()) == ([3], torchs)
    assert {environ[name] for name in threads.VARIABLES} == {"3"}
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace())  # a stand-in of the user's
    limit_libraries(1)
    assert asked == [3]


def test_libraries_are_found_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped files are read with their whole names, replaced or outside Unicode; what is not loaded is skipped."""
    maps = tmp_path / "maps"
    maps.write_bytes(
        b"7f00-7f01 r-xp 00000000 08:01 1    /odd \xff name/libscipy_openblas64_-32a4b2a6.so (deleted)\n"
        b"7f01-7f02 r--p 00000000 08:01 1    /usr/lib/libgomp.so.1\n"
        b"7f02-7f03 r--p 00000000 08:01 1    /usr/lib/libgomp.so.1\n"
        b"7f03-7f04 rw-p 00000000 00:00 0    [heap]\n"
        b"7f04-7f05 rw-p 00000000 00:00 0\n"
        b"7f05-7f06 r--p 00000000 08:01 1    /usr/lib/libcuda.so.1\n"
    )
    monkeypatch.setattr(threads, "_MAPS", maps)
    found = sorted(path for path, _kind in threads._loaded())
    assert found == ["/odd \udcff name/libscipy_openblas64_-32a4b2a6.so", "/usr/lib/libgomp.so.1"]
    threads.limit_threads(1, {})  # neither is loaded from there
