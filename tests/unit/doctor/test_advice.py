"""The advice on pinning: the calculation, the verdict, and what is reduced first. Sizes with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numapin.base import sizes
from numapin.data.budget import LockRoom
from numapin.doctor.advice import Loader, PinVerdict, advise

MIB = 1 << 20


def _loader(*, workers: int = 4, prefetch: int = 2, batch: int = 50 * MIB, ranks: int = 1) -> Loader:
    return Loader(num_workers=workers, prefetch_factor=prefetch, batch_bytes=batch, num_ranks=ranks)


def _remedy(loader: Loader, room_bytes: int | None, num_gpus: int = 1) -> tuple[PinVerdict | None, str | None]:
    advice = advise(loader, LockRoom(num_bytes=room_bytes, reason="a test"), num_gpus=num_gpus, shm_free_bytes=None)
    return advice.verdict, advice.remedy


def test_the_calculation_is_shown() -> None:
    """The reason has workers times prefetch factor times batch size, per rank and for all ranks, and the limit."""
    advice = advise(_loader(ranks=8), LockRoom(num_bytes=1 << 30, reason="a test"), num_gpus=8, shm_free_bytes=None)
    assert advice.verdict is PinVerdict.PIN
    assert advice.reason == (
        "4 workers x 2 batches x 50.0 MiB = 400.0 MiB per rank, 3.1 GiB for 8 ranks; "
        "up to 1.0 GiB per rank can be pinned (a test)"
    )
    assert (advice.footprint_bytes, advice.room_bytes) == (400 * MIB, 1 << 30)


@pytest.mark.parametrize(
    ("room_mib", "start"),
    [
        (400, "DataLoader(…, pin_memory=True)"),
        (399, "DataLoader(…, prefetch_factor=1)"),
        (200, "DataLoader(…, prefetch_factor=1)"),
        (199, "DataLoader(…, prefetch_factor=1, num_workers=3)"),
        (50, "DataLoader(…, prefetch_factor=1, num_workers=1)"),
        (49, "batches of at most 49.0 MiB, one at a time; if that is not possible: DataLoader(…, pin_memory=False)"),
    ],
)
def test_what_is_reduced_first(room_mib: int, start: str) -> None:
    """Prefetching is reduced before workers, workers before the batch; not pinning comes last."""
    verdict, remedy = _remedy(_loader(), room_mib * MIB)
    assert (remedy or "").startswith(start)
    assert verdict is (PinVerdict.PIN if room_mib == 400 else PinVerdict.LOWER)


@given(
    workers=st.integers(0, 64),
    prefetch=st.integers(1, 16),
    batch=st.integers(1, 1 << 33),
    room=st.integers(0, 1 << 40),
)
def test_the_advice_fits(workers: int, prefetch: int, batch: int, room: int) -> None:
    """The values that the remedy names are at least 1, not more than before, and fit the limit."""
    verdict, remedy = _remedy(_loader(workers=workers, prefetch=prefetch, batch=batch), room)
    named = dict(part.split("=") for part in (remedy or "").rstrip(")").split(", ")[1:] if "=" in part)
    if verdict is PinVerdict.LOWER and "prefetch_factor" in named:
        new = (int(named["prefetch_factor"]), int(named.get("num_workers", workers)))
        assert 1 <= new[0] <= prefetch
        assert 1 <= new[1] <= workers
        assert new[0] * new[1] * batch <= room
    elif verdict is PinVerdict.LOWER:
        assert batch > room
    else:
        assert max(1, workers * prefetch) * batch <= room


def test_without_gpu_or_without_numbers() -> None:
    """Without a GPU pinning is useless; without a loader or a known limit there is no verdict."""
    assert _remedy(_loader(), 1 << 30, num_gpus=0)[0] is PinVerdict.USELESS
    assert _remedy(_loader(), None) == (None, None)
    advice = advise(None, LockRoom(num_bytes=MIB, reason="a test"), num_gpus=1, shm_free_bytes=0)
    assert (advice.verdict, advice.footprint_bytes) == (None, None)
    assert advice.reason == "up to 1.0 MiB per rank can be pinned (a test)"


@pytest.mark.parametrize(
    ("workers", "free_mib", "reported"), [(4, 799, True), (4, 800, False), (4, None, False), (0, 1, False)]
)
def test_a_small_shm_is_reported(workers: int, free_mib: int | None, *, reported: bool) -> None:
    """With workers, the batches of all ranks must fit into /dev/shm; without workers they do not use it."""
    room, free = LockRoom(num_bytes=1 << 40, reason="a test"), None if free_mib is None else free_mib * MIB
    advice = advise(_loader(workers=workers, ranks=2), room, num_gpus=2, shm_free_bytes=free)
    assert ("too little for torch's loader" in advice.reason) == reported


def test_without_workers_there_is_one_batch() -> None:
    """Without workers, no batch is loaded ahead."""
    assert _loader(workers=0, prefetch=9).footprint_bytes == 50 * MIB


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("38.5M", 40370176), ("2g", 2 << 30), ("1.5KiB", 1536), (" 7 MB ", 7 * MIB), ("3T", 3 << 40), ("9B", 9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    """Units are powers of 1024, in any case, with or without B."""
    assert sizes.parse(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "0", "0.5", "-1M", "M", "1X", "1e9", "1,5M", "٣M", "9" * 40, "nan", "1 2M", "38.5", "38.5B"]
)
def test_bad_sizes(text: str) -> None:
    """Text that is not a size of at least one byte, or a part of a byte, is refused with an example."""
    with pytest.raises(ValueError, match=r"is not a size such as 38.5M"):
        sizes.parse(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (64 * MIB, "64.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 55, "32768.0 TiB"),
    ],
)
def test_sizes_are_shown(num_bytes: int, text: str) -> None:
    """A size has the largest unit, up to TiB, that leaves at least 1 before the point."""
    assert sizes.render(num_bytes) == text
