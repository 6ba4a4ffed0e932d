"""The GPU of a process below `numapin exec --children`, from its environment and its number of a device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.children.seam import (
    ChildTable,
    DeviceEntry,
    UnknownDevice,
    device_of,
    hiding_variables,
    known_device,
    num_visible,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

LISTS = hiding_variables()
NAMES = (*LISTS, "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def table(environ: Mapping[str, str], *, shown: tuple[int, ...] = (0, 1, 2, 3)) -> ChildTable:
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


@pytest.mark.parametrize(
    ("environ", "gpu"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": " +2x"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "MIG-10000000-0000-0000-0000-00000000000a"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"LOCAL_RANK": "3"}, 3),
        ({"LOCAL_RANK": "5"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "3,1", "LOCAL_RANK": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "1"}, 3),
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1", "LOCAL_RANK": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, None),
        ({"SLURM_LOCALID": "2"}, None),
        ({"LOCAL_RANK": "x"}, None),
        ({"LOCAL_RANK": "9999999"}, None),
    ],
)
def test_environment_names_the_gpu(environ: Mapping[str, str], gpu: int | None) -> None:
    """A list of one, or else a local rank, names the GPU; anything else leaves it to the process."""
    found = known_device(table({}), environ)
    assert (None if found is None else found[0].index) == gpu


def test_what_the_command_has_says_nothing() -> None:
    """All processes inherit the variables of the command itself, so these do not assign a GPU to any of them."""
    given = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1,2"}
    plan = table(given, shown=(1, 2))
    assert known_device(plan, given) is None
    assert known_device(plan, given | {"LOCAL_RANK": "0"}) is not None
    assert [device_of(plan, given, number).index for number in range(2)] == [1, 2]


def test_numbers_count_in_the_own_list() -> None:
    """Device n of a process is entry n of its list; indices in it count all GPUs, not those of the command."""
    plan = table({"CUDA_VISIBLE_DEVICES": "1,2"}, shown=(1, 2))
    environ = {"CUDA_VISIBLE_DEVICES": "2,1"}
    assert [device_of(plan, environ, number).index for number in range(2)] == [2, 1]
    assert num_visible(plan, environ) == 2


@pytest.mark.parametrize(
    ("environ", "number", "problem"),
    [
        ({}, 4, "there is no device 4: the command sees 4"),
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, 2, "there is no device 2: CUDA_VISIBLE_DEVICES=1,2"),
        ({}, -1, "there is no device -1: the command sees 4"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, -1, "there is no device -1: CUDA_VISIBLE_DEVICES=0,1"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, 0, "names 7, which is not one of the GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, 0, "names GPU-, which is not one of the GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, 0, "cannot combine"),
    ],
)
def test_unknown_devices(environ: Mapping[str, str], number: int, problem: str) -> None:
    """What the plan does not have is an error with the variable and its value."""
    with pytest.raises(UnknownDevice, match=problem):
        device_of(table({}), environ, number)


def test_a_list_that_is_taken_away() -> None:
    """A child that unsets the command's list may see GPUs that the plan does not have."""
    plan = table({"CUDA_VISIBLE_DEVICES": "1,2"}, shown=(1, 2))
    for environ in ({}, {"HIP_VISIBLE_DEVICES": "1"}):
        with pytest.raises(UnknownDevice, match="because CUDA_VISIBLE_DEVICES was unset"):
            device_of(plan, environ, 0)


def test_text_of_the_variable() -> None:
    """Each variable is a line, read without a parser; a line break in a value cannot break the text."""
    text = table({"CUDA_VISIBLE_DEVICES": "1\n2", "LOCAL_RANK": "a=b"}).render()
    first, *lines, last = text.split("\n")
    assert (first, lines[:2], "LOCAL_RANK=a=b" in lines) == ("3", list(LISTS[:2]), True)
    assert len(json.loads(last)["devices"]) == 4
    for wrong in ("", "1\n{}", "3\n", "3\n[]", "3\n{}"):
        with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
            ChildTable.parse(wrong)
