"""Properties of the CUDA visibility model, for any machine and any list."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from numapin import Gpu
from tests.property.seam import Mig, apply_visibility

_DIGITS = "0123456789abcdef"


@st.composite
def _machines(draw: st.DrawFn, *, alike: bool = False) -> tuple[Gpu, ...]:
    """Draw GPUs in any NVML order; `alike` ones have the same name and no MIG instances."""
    places = draw(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=8, unique=True))
    leads = draw(st.lists(st.text(_DIGITS, min_size=8, max_size=8), min_size=8, max_size=8, unique=True))
    split = st.just(0) if alike else st.integers(0, 2)
    names = st.just("NVIDIA A") if alike else st.sampled_from(["NVIDIA A", "NVIDIA B", None])
    return tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{leads[index]}-0000-0000-0000-000000000000",
            pci=f"{place >> 8:04x}:{place & 255:02x}:00.0",
            name=draw(names),
            mig=tuple(Mig(uuid=f"MIG-{leads[index]}-{n:04}-0000-0000-000000000000") for n in range(draw(split))),
        )
        for index, place in enumerate(places)
    )


_ENTRIES = st.one_of(
    st.integers(-1, 9).map(str),
    st.text(_DIGITS, max_size=3).map(lambda text: f"GPU-{text}"),
    st.text(_DIGITS, max_size=3).map(lambda text: f"MIG-{text}"),
    st.text(max_size=5),
)
_LISTS = st.none() | st.lists(_ENTRIES, max_size=6).map(",".join)
_ORDERS = st.sampled_from([None, "PCI_BUS_ID", "FASTEST_FIRST", ""])


def _by_pci(gpus: tuple[Gpu, ...], text: str | None) -> dict[str | None, int | None]:
    result, _ = apply_visibility(gpus, visible_devices=text, device_order=None)
    return {gpu.pci: gpu.cuda_index for gpu in result if gpu.visible}


@given(_machines(), _LISTS, _ORDERS)
def test_any_list(gpus: tuple[Gpu, ...], text: str | None, order: str | None) -> None:
    """Visible GPUs are numbered 0 to k-1, or a note says why not, or why none is visible; nothing else changes."""
    result, notes = apply_visibility(gpus, visible_devices=text, device_order=order)
    visible = [gpu.cuda_index for gpu in result if gpu.visible]
    numbers = [number for number in visible if number is not None]
    if len(numbers) == len(visible):
        assert sorted(numbers) == list(range(len(numbers)))
    else:
        assert (numbers, len(visible)) == ([], len(gpus))
        assert any("unknown" in note for note in notes)
    assert tuple(replace(gpu, visible=True, cuda_index=None) for gpu in result) == gpus
    hidden = [gpu for gpu in result if not gpu.visible]
    if hidden and (text is None or len(hidden) == len(gpus)):
        assert notes


@given(_machines(alike=True), _LISTS, st.randoms(use_true_random=False))
def test_nvml_order_does_not_matter(gpus: tuple[Gpu, ...], text: str | None, random: Random) -> None:
    """A PCI address gets the same CUDA index in any NVML order."""
    shuffled = list(gpus)
    random.shuffle(shuffled)
    renumbered = tuple(replace(gpu, index=index) for index, gpu in enumerate(shuffled))
    assert _by_pci(renumbered, text) == _by_pci(gpus, text)


@given(_machines(), st.integers(0, 8), st.lists(_ENTRIES, max_size=4))
def test_nothing_after_a_bad_entry_counts(gpus: tuple[Gpu, ...], good: int, rest: list[str]) -> None:
    """Entries after one that names no device have no effect."""
    start = [*map(str, range(min(good, len(gpus)))), "99"]
    assert _by_pci(gpus, ",".join([*start, *rest])) == _by_pci(gpus, ",".join(start))


@given(_machines(alike=True), st.data())
def test_indices_and_uuids_name_the_same_gpus(gpus: tuple[Gpu, ...], data: st.DataObject) -> None:
    """A list of indices shows the same GPUs as a list of their UUIDs, complete or shortened to a unique prefix."""
    in_order = sorted(gpus, key=lambda gpu: gpu.pci or "")
    chosen = data.draw(st.lists(st.sampled_from(range(len(gpus))), min_size=1, unique=True))
    cut = data.draw(st.sampled_from([12, 20, 40]))
    by_uuid = ",".join((in_order[place].uuid or "")[:cut] for place in chosen)
    assert _by_pci(gpus, by_uuid) == _by_pci(gpus, ",".join(map(str, chosen)))
    assert list(_by_pci(gpus, by_uuid)) == [gpu.pci for gpu in gpus if gpu in [in_order[place] for place in chosen]]
