"""Machine files: how their format is recognized, and the error for an unknown one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from numapin import discover
from numapin.errors import MachineError, UsageError
from tests.machines.grids import grid
from tests.unit.topology.seam import sysfs

if TYPE_CHECKING:
    from pathlib import Path

PU = '<object type="PU" os_index="7"/>'
HWLOC = f'<topology version="2.0"><object type="Machine">{PU}</object></topology>'
NCCL = '<system version="1"><cpu numaid="0" affinity="00000100"/></system>'


def _file(folder: Path, content: str | bytes) -> Path:
    path = folder / "machine"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "cpu"),
    [
        (HWLOC, 7),
        (f'<?xml version="1.0"?>\n<!-- <system> -->\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n{HWLOC}', 7),
        (NCCL, 8),
        (f"<!-- <topology> -->{NCCL}", 8),
        (b"\xef\xbb\xbf \n" + NCCL.encode(), 8),
        (json.dumps(grid(nodes=1, cores=1).to_json()), 0),
    ],
)
def test_the_content_says_which_format_it_is(content: str | bytes, cpu: int, tmp_path: Path) -> None:
    """The root element of XML decides, whatever comes before it; JSON is ours."""
    assert cpu in discover(machine=_file(tmp_path, content)).cpus


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("\n<root/>", "line 2: <root>: this is neither hwloc's XML, which begins with <topology>, nor NCCL's"),
        ("<root><topology/></root>", "line 1: <root>: this is neither"),
        ("<topology>", "line 1, column 11: not XML"),
        ("[1]", "line 1: neither JSON nor XML: '[1]'"),
        ("", "line 1: neither JSON nor XML: ''"),
        (b"\x1f\x8b", "byte 1 is not UTF-8"),
        ("{" + " " * (64 << 20), "larger than 64 MiB"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_file_is_named_with_the_problem(content: str | bytes, problem: str, tmp_path: Path) -> None:
    """The message starts with the file, and the hint says how to get a good one."""
    path = _file(tmp_path, content)
    with pytest.raises(MachineError) as caught:
        discover(machine=path)
    assert caught.value.message.startswith(f"{path}: {problem}")
    assert caught.value.hint


def test_a_missing_file(tmp_path: Path) -> None:
    """The message has the system's error text."""
    with pytest.raises(MachineError, match="missing: No such file or directory"):
        discover(machine=tmp_path / "missing")


def test_two_machines(tmp_path: Path) -> None:
    """Only one machine can be read."""
    with pytest.raises(UsageError, match="--root and --machine both name a machine"):
        discover(root=tmp_path, machine=tmp_path)


def test_gpu_nodes_win_over_the_file(tmp_path: Path) -> None:
    """Pairs of a GPU and a node; one GPU on two nodes is refused."""
    path = _file(tmp_path, json.dumps(grid(gpus=[0, 0]).to_json()))
    assert [gpu.node for gpu in discover(machine=path, gpu_nodes=iter([("1", 1)])).gpus] == [0, 1]
    with pytest.raises(UsageError, match="puts gpu0 on nodes 1 and 0"):
        discover(machine=path, gpu_nodes=[("0", 1), ("0", 0)])


def test_a_bug_in_a_reader_is_not_called_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a contradiction that is found while the machine is built is reported as the machine's."""

    def broken(_root: Path, *, source: str) -> None:
        raise ValueError(f"a bug in {source}")

    monkeypatch.setattr(sysfs, "read_sysfs", broken)
    with pytest.raises(ValueError, match="a bug"):
        discover()
