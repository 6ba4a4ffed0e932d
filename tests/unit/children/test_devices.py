"""The GPU of a process below `numapin exec --children`, from its environment and its number of a device."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.recorded.screens import compare_answers
from tests.unit.children.seam import (
    ChildTable,
    DeviceEntry,
    UnknownDevice,
    device_of,
    hiding_variables,
    known_device,
    num_visible,
)

LISTS = hiding_variables()
NAMES = (*LISTS, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def table(environ: Mapping[str, str], shown: tuple[int, ...] = (0, 1, 2, 3)) -> ChildTable:
    """Return the table of a command that sees these of four GPUs; GPU n has UUID GPU-n000…."""
    devices = [
        DeviceEntry(
            number=number,
            bare=gpu,
            index=gpu,
            uuid=f"GPU-{gpu}0000000-0000-0000-0000-000000000000",
            pci=f"0000:0{gpu}:00.0",
            mig=(f"MIG-{gpu}0000000-0000-0000-0000-00000000000a",),
            slice="",
        )
        for number, gpu in enumerate(shown)
    ]
    saw = {name: environ.get(name) for name in NAMES}
    made = ChildTable(
        devices=devices, allowed_cpus="0-1", run="/run", strict=False, verbose=False, lists=LISTS, saw=saw
    )
    return ChildTable.parse(made.render())


def _answer(line: str) -> str:
    """Return the known GPU of a process and its devices. Before " | " are the variables that the command has."""
    outer, _, own = line.rpartition("| ")
    command, environ = (dict(word.split("=", 1) for word in shlex.split(text)) for text in (outer, own))
    shown = tuple(map(int, command.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")))
    plan = table(command, shown)
    try:
        if "device" in environ:
            return device_of(plan, environ, int(environ.pop("device"))).name
        known = known_device(plan, environ)
        devices = [device_of(plan, environ, number).name for number in range(num_visible(plan, environ))]
    except UnknownDevice as error:
        return f"error: {error}"
    return f"{f'{known[0].name} from {known[1]}' if known else 'unknown'}; devices: {', '.join(devices)}"


def test_each_process_has_the_recorded_devices() -> None:
    """A list of one, or else a local rank, names the GPU; device n of a process is entry n of its own list."""
    compare_answers(Path(__file__).with_name("devices.txt"), _answer)


def test_text_of_the_variable() -> None:
    """Each variable is a line, read without a parser; a line break in a value cannot break the text."""
    text = table({"CUDA_VISIBLE_DEVICES": "1\n2", "LOCAL_RANK": "a=b"}).render()
    first, *lines, last = text.split("\n")
    assert (first, lines[:2], "LOCAL_RANK=a=b" in lines) == ("3", list(LISTS[:2]), True)
    assert len(json.loads(last)["devices"]) == 4
    for wrong in ("", "1\n{}", "3\n", "3\n[]", "3\n{}"):
        with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
            ChildTable.parse(wrong)
