"""CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: a table of CUDA's observed behavior, and the cases beyond it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, Final

from tests.topology.reading import Case

OBSERVED: Final = Path(__file__).parents[1] / "nvml" / "cuda-visible-devices.txt"
UUIDS: Final = tuple(f"GPU-{digit * 8}-0000-1111-2222-333333333333" for digit in "abcd")


def gpus(order: str = "0123", names: str = "aaaa", mig: str = "", **without: None) -> list[dict[str, Any]]:
    """Return NVML's GPUs; `order` gives each one's place on the PCI bus, `mig` those with two instances."""
    return [
        {
            "uuid": UUIDS[index],
            "pci": f"0000:{place}1:00.0",
            "name": f"NVIDIA {names[index]}",
            "mig": [f"MIG-{index}{n}000000-0000-0000-0000-000000000000" for n in "ab" if str(index) in mig],
            **without,
        }
        for index, place in enumerate(order)
    ]


def shown(what: str, nvml: list[dict[str, Any]], *lists: str | None, order: str = "") -> dict[str, Case]:
    """Return a case for each list; None: the variable is unset."""
    device_order = {"CUDA_DEVICE_ORDER": order} if order else {}
    environs = [device_order | ({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) for text in lists]
    return {f"{what}: {environ}": Case(nvml=nvml, environ=environ) for environ in environs}


def observed() -> dict[str, tuple[Case, str]]:
    """Return every value that was tried on hardware with two GPUs, and the GPUs that CUDA showed, in CUDA's order."""
    rows: dict[str, tuple[Case, str]] = {}
    uuids = ("", "")
    for line in OBSERVED.read_text(encoding="utf-8").splitlines():
        if line.startswith("uuids "):
            _, *found = line.split()
            uuids = (found[0], found[1])
        elif not line.startswith("#"):
            value, seen = line.rsplit(" ", 1)
            text = ast.literal_eval(value)
            environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
            if text is not None:
                environ["CUDA_VISIBLE_DEVICES"] = text.replace("<A>", uuids[0]).replace("<B>", uuids[1])
            nvml = [{"uuid": uuids[n], "pci": f"0000:00:0{6 + n}.0", "name": "NVIDIA H200"} for n in (0, 1)]
            rows[f"{len(rows)} {environ}"] = (Case(nvml=nvml, environ=environ), seen)
    return rows


def instance(gpu: int, letter: str = "a") -> str:
    return f"MIG-{gpu}{letter}000000-0000-0000-0000-000000000000"


CASES: Final = {
    **shown("NVML's order is not CUDA's", gpus("3102"), None, "0,1"),
    "addresses are sorted as numbers": Case(
        nvml=[
            {"pci": address, "name": "NVIDIA T4"}
            for address in ("10000:01:00.0", "ffff:01:00.0", "0000:10:00.0", "0000:0a:00.0")
        ],
        environ={},
    ),
    **shown("no GPU, no note", [], "0,0"),
    **shown(
        "a bad entry gets one note with its reason and its cost",
        gpus(),
        *("0,9,1", "0,-1,1", "9,0", "0,,1", "0,4294967297", "GPU-a,1", "1,GPU-a", "GPU-a, GPU-b", "GPU-ax"),
        *("GPU-a,GPU-abc", "1,2,1"),
    ),
    **shown("hiding all on purpose has a note of its own", gpus(), "", " ", "-1", "NoDevFiles", "void", "none"),
    **shown("nothing is lost, so there is no note", gpus(), None, "0", "3,2,1,0", "GPU-a,GPU-c", "1,", " 2 ,0", "3,1"),
    "an index may have thousands of zeros": Case(
        nvml=gpus(), environ={"CUDA_VISIBLE_DEVICES": "0" * 5000 + "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    ),
    "a GPU that no variable hides cannot be chosen beside a MIG instance": Case(nvml=gpus(mig="1"), gpus="0"),
    "a prefix must fit one GPU alone": Case(
        nvml=[{"uuid": f"GPU-ab{n}" + "0" * 29, "pci": f"0000:0{n}:00.0", "name": "x"} for n in range(2)],
        environ={"CUDA_VISIBLE_DEVICES": "GPU-ab0,GPU-ab"},
    ),
    **shown(
        "unlike GPUs are sorted by an unknown speed",
        gpus("3210", "abab"),
        None,
        "0",
        "2,1",
        "0,9",
        order="FASTEST_FIRST",
    ),
    **shown("in PCI order unlike GPUs are known", gpus("3210", "abab"), None, "0,3", order="PCI_BUS_ID"),
    **shown(
        "a list of UUIDs, or of nothing, does not depend on the order",
        gpus("3210", "abab"),
        "GPU-c,GPU-b",
        "",
        "9",
        "0,0",
        "junk",
    ),
    **shown("GPUs without a name may be unlike", gpus("01", name=None), None),
    **shown("one GPU has a known order", gpus("0", name=None), None),
    **shown("without UUIDs only a list of indices can be checked", gpus(uuid=None), "2,0", "GPU-abcdef", "MIG-abcdef"),
    **shown(
        "instances count as their GPU, and only the first one's counts",
        gpus(mig="12"),
        *(None, instance(2, "b"), instance(2, "b")[:7], f"{instance(2)},{instance(1)}"),
        *(f"{instance(1)},{instance(1, 'b')}", f"{instance(1)},{instance(1)}", "GPU-d,GPU-a", "3,0", "MIG-ffffffff"),
    ),
    "old names of instances that the driver lists are exact": Case(
        nvml=[{"uuid": UUIDS[0], "pci": "0000:01:00.0", "name": "x", "mig": [f"MIG-{UUIDS[0]}/{n}/0" for n in (1, 2)]}],
        environ={"CUDA_VISIBLE_DEVICES": f"MIG-{UUIDS[0]}/2/0"},
    ),
}
