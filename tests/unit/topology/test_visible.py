"""CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: a table of CUDA's observed behavior, and the cases beyond it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from numapin.topology.model import Gpu, Mig
from numapin.topology.visible import apply_visibility

_TABLE = Path(__file__).parents[2] / "nvml" / "cuda-visible-devices.txt"
_UUIDS = tuple(f"GPU-{digit * 8}-0000-1111-2222-333333333333" for digit in "abcd")


def _gpus(*, order: str = "0123", names: str = "aaaa", uuids: bool = True, mig: str = "") -> tuple[Gpu, ...]:
    """Make GPUs; `order` gives each one's place on the PCI bus, `mig` the indices of those with two instances."""
    return tuple(
        Gpu(
            index=index,
            uuid=_UUIDS[index] if uuids else None,
            pci=f"0000:{place}1:00.0",
            name=f"NVIDIA {names[index]}",
            mig=tuple(Mig(uuid=f"MIG-{index}{n}000000-0000-0000-0000-000000000000") for n in "ab" if str(index) in mig),
        )
        for index, place in enumerate(order)
    )


def _seen(gpus: tuple[Gpu, ...], text: str | None, device_order: str | None = None) -> list[int]:
    """Return the NVML indices of the GPUs that CUDA sees, in CUDA's order."""
    result, _ = apply_visibility(gpus, visible_devices=text, device_order=device_order)
    seen = [gpu for gpu in result if gpu.visible]
    assert all(gpu.cuda_index is not None for gpu in seen)
    return [gpu.index for gpu in sorted(seen, key=lambda gpu: gpu.cuda_index or 0)]


def _notes(gpus: tuple[Gpu, ...], text: str | None, device_order: str | None = None) -> tuple[str, ...]:
    return apply_visibility(gpus, visible_devices=text, device_order=device_order)[1]


def _table() -> list[tuple[str | None, tuple[str, str], str]]:
    rows: list[tuple[str | None, tuple[str, str], str]] = []
    uuids = ("", "")
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("uuids "):
            _, first, second = line.split()
            uuids = (first, second)
        elif not line.startswith("#"):
            value, seen = line.rsplit(" ", 1)
            text = ast.literal_eval(value)
            rows.append((text and text.replace("<A>", uuids[0]).replace("<B>", uuids[1]), uuids, seen))
    return rows


@pytest.mark.parametrize(("text", "uuids", "seen"), _table())
def test_agrees_with_what_the_driver_did(text: str | None, uuids: tuple[str, str], seen: str) -> None:
    """Every value that was tried on hardware shows the GPUs that CUDA showed, in CUDA's order."""
    gpus = tuple(Gpu(index=i, uuid=uuids[i], pci=f"0000:00:0{6 + i}.0", name="NVIDIA H200") for i in (0, 1))
    expected = [] if seen in ("none", "refused") else [int(index) for index in seen.split(",")]
    assert _seen(gpus, text, "PCI_BUS_ID") == expected
    assert any("refuses to start" in note for note in _notes(gpus, text)) == (seen == "refused")


def test_table_is_read_whole() -> None:
    """The table holds every value tried, among them some of each outcome."""
    outcomes = [seen for _, _, seen in _table()]
    assert len(outcomes) > 100
    assert {"none", "refused", "0", "1", "0,1", "1,0"} <= set(outcomes)


def test_without_gpus_there_is_nothing_to_say() -> None:
    """On a machine without GPUs no value of the variables gets a note."""
    assert apply_visibility((), visible_devices="0,0", device_order="junk") == ((), ())


def test_unset_shows_every_gpu_in_pci_order() -> None:
    """Without a list, CUDA counts GPUs of one kind by PCI address, whatever NVML's order is."""
    gpus = _gpus(order="3102")
    assert _seen(gpus, None) == [2, 1, 3, 0]
    assert _notes(gpus, None) == ()


def test_pci_addresses_are_sorted_as_numbers() -> None:
    """Domain 10000 comes after domain ffff, and bus 0a before bus 10."""
    addresses = ("10000:01:00.0", "ffff:01:00.0", "0000:10:00.0", "0000:0a:00.0")
    gpus = tuple(Gpu(index=i, pci=pci, name="NVIDIA T4") for i, pci in enumerate(addresses))
    assert _seen(gpus, None) == [3, 2, 1, 0]


def test_list_counts_in_cuda_order_not_in_nvml_order() -> None:
    """An index in the list is a place in PCI order."""
    assert _seen(_gpus(order="3210"), "0,1") == [3, 2]


def test_result_keeps_the_order_and_forgets_an_earlier_answer() -> None:
    """GPUs come back in the order given; the effect of an earlier list is forgotten."""
    first, _ = apply_visibility(_gpus(), visible_devices="3,1", device_order=None)
    again, _ = apply_visibility(first, visible_devices=None, device_order=None)
    assert [gpu.index for gpu in first] == [0, 1, 2, 3]
    assert [(gpu.visible, gpu.cuda_index) for gpu in first] == [(False, None), (True, 1), (False, None), (True, 0)]
    assert [gpu.cuda_index for gpu in again] == [0, 1, 2, 3]


_REST = "CUDA ignores it and everything after it"


@pytest.mark.parametrize(
    ("text", "why", "loss"),
    [
        ("0,9,1", "there is no device 9", _REST),
        ("0,-1,1", "there is no device -1", _REST),
        ("9,0", "there is no device 9", "CUDA sees no GPU"),
        ("0,,1", "'' is not an index", _REST),
        ("0,4294967297", "'4294967297' is not an index", _REST),
        ("GPU-a,1", "'1' is of another kind than the first entry", _REST),
        ("1,GPU-a", "'GPU-a' is of another kind than the first entry", _REST),
        ("GPU-a, GPU-b", "CUDA does not skip the blank in ' GPU-b'", _REST),
        ("GPU-ax", "'GPU-ax' is not a UUID", "CUDA sees no GPU"),
        ("GPU-a,GPU-abc", "there is no 'GPU-abc'", _REST),
    ],
)
def test_bad_entry_is_said_with_its_reason_and_its_cost(text: str, why: str, loss: str) -> None:
    """A list with a bad entry gets one note that quotes it and ends with a command to type."""
    note = f"CUDA_VISIBLE_DEVICES={text}: {why}, so {loss}; list the devices with: nvidia-smi -L"
    assert _notes(_gpus(), text) == (note,)


@pytest.mark.parametrize("text", ["", " ", "-1", "NoDevFiles", "void", "none"])
def test_hiding_all_on_purpose_is_said(text: str) -> None:
    """The usual values for hiding every GPU do so, with a note of their own."""
    note = f"CUDA_VISIBLE_DEVICES={text} hides every GPU from CUDA; to use them: unset CUDA_VISIBLE_DEVICES"
    assert _seen(_gpus(), text) == []
    assert _notes(_gpus(), text) == (note,)


def test_device_named_twice_is_said() -> None:
    """CUDA refuses a list with a duplicate; the note names the GPU."""
    note = "CUDA_VISIBLE_DEVICES=1,2,1 names gpu1 twice, so CUDA refuses to start; name each device once"
    assert _notes(_gpus(), "1,2,1") == (note,)


@pytest.mark.parametrize("text", [None, "0", "3,2,1,0", "GPU-a,GPU-c", "1,", " 2 ,0"])
def test_a_list_that_shows_what_it_names_gets_no_note(text: str | None) -> None:
    """There is no note if nothing is lost; a comma at the end loses nothing."""
    assert _notes(_gpus(), text) == ()


def test_prefix_that_fits_several_gpus_is_a_bad_entry() -> None:
    """A UUID prefix must fit one GPU alone."""
    gpus = tuple(Gpu(index=i, uuid=f"GPU-ab{i}" + "0" * 29, pci=f"0000:0{i}:00.0", name="x") for i in range(2))
    assert _seen(gpus, "GPU-ab0,GPU-ab") == [0]
    assert "several UUIDs start with 'GPU-ab'" in _notes(gpus, "GPU-ab0,GPU-ab")[0]


class TestUnlikeGpus:
    """GPUs of different names, which CUDA sorts by a speed that is unknown here."""

    gpus = _gpus(order="3210", names="abab")

    @pytest.mark.parametrize("text", [None, "0", "2,1", "0,9"])
    def test_order_is_unknown(self, text: str | None) -> None:
        """Without a list or with indices, all stay visible without CUDA index, and the remedy is named."""
        result, notes = apply_visibility(self.gpus, visible_devices=text, device_order="FASTEST_FIRST")
        assert {(gpu.visible, gpu.cuda_index) for gpu in result} == {(True, None)}
        assert notes[-1] == (
            "CUDA puts the fastest of different GPUs first (NVIDIA a, NVIDIA b), so its order is unknown; "
            "type: export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )

    def test_pci_order_is_known(self) -> None:
        """CUDA_DEVICE_ORDER=PCI_BUS_ID makes the order known."""
        assert _seen(self.gpus, None, "PCI_BUS_ID") == [3, 2, 1, 0]
        assert _seen(self.gpus, "0,3", "PCI_BUS_ID") == [3, 0]

    def test_uuids_are_exact(self) -> None:
        """A list of UUIDs does not depend on the order."""
        assert _seen(self.gpus, "GPU-c,GPU-b") == [2, 1]
        assert _notes(self.gpus, "GPU-c,GPU-b") == ()

    @pytest.mark.parametrize("text", ["", "9", "0,0", "junk"])
    def test_nothing_is_nothing_in_any_order(self, text: str) -> None:
        """A list that shows nothing shows nothing whatever the order is."""
        assert _seen(self.gpus, text) == []

    def test_gpus_without_a_name_may_be_unlike(self) -> None:
        """GPUs whose name is unknown are not taken for equal, but one GPU alone has a known order."""
        nameless = tuple(Gpu(index=i, pci=f"0000:0{i}:00.0") for i in range(2))
        assert "(unknown)" in _notes(nameless, None)[0]
        assert _seen(nameless[:1], None) == [0]

    def test_gpus_without_a_pci_address_cannot_be_sorted(self) -> None:
        """Without PCI addresses, CUDA_DEVICE_ORDER would not help: the remedy is to name GPUs by UUID."""
        gpus = tuple(Gpu(index=i, uuid=_UUIDS[i], name="x") for i in range(2))
        assert _notes(gpus, "1", "PCI_BUS_ID") == (
            "CUDA's order of the GPUs is unknown because some PCI addresses are; name them by UUID",
        )
        assert _seen(gpus, "GPU-b") == [1]


class TestUnknownUuids:
    """GPUs found without a driver."""

    gpus = _gpus(uuids=False)

    def test_indices_work(self) -> None:
        """A list of indices needs no UUIDs."""
        assert _seen(self.gpus, "2,0") == [2, 0]

    @pytest.mark.parametrize("text", ["GPU-abcdef", "MIG-abcdef"])
    def test_uuids_cannot_be_checked(self, text: str) -> None:
        """A list of UUIDs leaves every GPU visible without CUDA index, and a note says that it cannot be checked."""
        result, notes = apply_visibility(self.gpus, visible_devices=text, device_order=None)
        assert {(gpu.visible, gpu.cuda_index) for gpu in result} == {(True, None)}
        unknown = "the UUIDs of some GPUs are unknown (is the driver loaded?); check it with: nvidia-smi -L"
        assert notes == (f"CUDA_VISIBLE_DEVICES={text} cannot be checked: {unknown}",)


class TestMig:
    """GPUs that are split into MIG instances: 1 and 2 of four."""

    gpus = _gpus(mig="12")

    def test_one_instance_is_one_gpu(self) -> None:
        """The parent of the named instance is CUDA's only device, without a note."""
        uuid = self.gpus[2].mig[1].uuid
        assert _seen(self.gpus, uuid) == [2]
        assert _seen(self.gpus, uuid[:7]) == [2]
        assert _notes(self.gpus, uuid) == ()

    def test_only_the_first_of_several_counts(self) -> None:
        """Of several instances, the first one's parent is visible, and a note says with which drivers."""
        text = f"{self.gpus[2].mig[0].uuid},{self.gpus[1].mig[0].uuid}"
        assert _seen(self.gpus, text) == [2]
        (note,) = _notes(self.gpus, text)
        assert note.startswith("only a MIG instance of gpu2 counts as visible to CUDA: drivers before R570 show ")
        assert note.endswith("; start a run for each instance, or list whole GPUs only, by UUID")

    def test_two_instances_of_one_gpu_are_no_duplicate(self) -> None:
        """Instances of one GPU may be listed together; the same instance twice may not."""
        first, second = (mig.uuid for mig in self.gpus[1].mig)
        assert _seen(self.gpus, f"{first},{second}") == [1]
        assert _seen(self.gpus, f"{first},{first}") == []

    def test_split_gpu_hides_whole_ones(self) -> None:
        """Without a list, the first split GPU is all that CUDA shows; notes give both the rule and the choice."""
        notes = _notes(self.gpus, None)
        assert _seen(self.gpus, None) == [1]
        assert len(notes) == 2
        assert notes[1] == (
            "gpu1 is split into MIG instances, and CUDA uses only the first; choose: "
            "export CUDA_VISIBLE_DEVICES=MIG-1a000000-0000-0000-0000-000000000000"
        )

    def test_whole_gpus_can_be_listed(self) -> None:
        """A list without split GPUs is as on any machine."""
        assert _seen(self.gpus, "GPU-d,GPU-a") == [3, 0]
        assert _notes(self.gpus, "3,0") == ()

    def test_unknown_instance_is_a_bad_entry(self) -> None:
        """An instance that is not there shows nothing."""
        assert _seen(self.gpus, "MIG-ffffffff") == []
        assert "there is no 'MIG-ffffffff'" in _notes(self.gpus, "MIG-ffffffff")[0]

    def test_old_names_are_found_by_their_gpu(self) -> None:
        """The form of drivers before R470 names the parent's UUID; a GPU without instances is not a parent."""
        assert _seen(self.gpus, f"MIG-{_UUIDS[1]}/1/0") == [1]
        assert _seen(self.gpus, f"MIG-{_UUIDS[0]}/1/0") == []

    def test_old_names_that_the_driver_lists_are_exact(self) -> None:
        """If the driver itself lists the old form, the named instance is found by it."""
        mig = tuple(Mig(uuid=f"MIG-{_UUIDS[0]}/{n}/0") for n in (1, 2))
        gpus = (Gpu(index=0, uuid=_UUIDS[0], pci="0000:01:00.0", name="x", mig=mig),)
        assert _seen(gpus, mig[1].uuid) == [0]
        assert _notes(gpus, f"{mig[1].uuid},{mig[1].uuid}")[0].startswith("CUDA_VISIBLE_DEVICES=MIG-GPU-")
