"""Numbers that are too large, and impossible paths, are refused with a message by every option that takes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest

from numapin import Nic
from numapin.errors import NumapinError, UsageError
from tests.integration.launching import forked, script
from tests.machines.grids import grid
from tests.unit.base.seam import (
    MAX_GPUS,
    MAX_LINKS,
    MAX_NICS,
    MAX_NODES,
    MAX_RANKS,
    CpuReading,
    CpuSet,
    NodeReading,
    PciReading,
    Readings,
    build,
    find_task,
    numapin,
    read_line,
)

TOO_MANY = str(MAX_RANKS + 1)
LONG = "x" * 5000
GOOD = Readings(host=None, source="s", cpus=(CpuReading(cpu=0, siblings=CpuSet({0})),), nodes=())


def refused(*words: str) -> str:
    """Run a numapin command in this process; return the text of the error, ours or click's, that it must end with."""
    with pytest.raises((NumapinError, click.ClickException)) as caught:
        numapin.main(list(words), prog_name="numapin", standalone_mode=False)
    return str(caught.value)


def test_ranks_have_a_bound(tmp_path: Path) -> None:
    """The message names it. Those of `plan`, of a `Request`, and the help pages are recorded.

    PET_NPROC_PER_NODE is torchrun's spelling of the option.
    """
    assert str(MAX_RANKS) in refused("exec", "--local-rank", "0", "--local-size", TOO_MANY, "true")
    assert str(MAX_RANKS) in refused("job", "slurm", "--gpus-per-node", "0", "--ranks-per-node", TOO_MANY, "train.py")
    done = forked("run", "--dry-run", script(tmp_path, ""), PET_NPROC_PER_NODE=TOO_MANY)
    assert (done.status, f"is {TOO_MANY}; it must be at most {MAX_RANKS}" in done.err) == (2, True), done.err


def test_the_ranks_of_a_launcher_have_the_bound() -> None:
    """A launcher's variable with a million tasks is refused before planning; such a command line goes to click."""
    for environ in (
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": TOO_MANY},
        {"LOCAL_RANK": str(MAX_RANKS)},
        {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "999999"},
    ):
        with pytest.raises(UsageError, match=f"at most {MAX_RANKS} ranks"):
            find_task(environ)
    assert find_task({"LOCAL_RANK": str(MAX_RANKS - 1), "LOCAL_WORLD_SIZE": str(MAX_RANKS)}).size == MAX_RANKS
    assert read_line(["--local-size", TOO_MANY, "true"]) is None
    assert read_line(["--local-size", str(MAX_RANKS), "true"]) is not None


@pytest.mark.parametrize(
    ("readings", "problem"),
    [
        (GOOD._replace(nodes=tuple(NodeReading(n, CpuSet()) for n in range(MAX_NODES + 1))), "1024 NUMA nodes"),
        (GOOD._replace(pci=tuple(PciReading(address=f"{n:04x}:00:00.0") for n in range(MAX_GPUS + 1))), "256 GPUs"),
        (
            GOOD._replace(pci=(PciReading(address="0000:00:00.0", interfaces=(Nic(name="e"),) * (MAX_NICS + 1)),)),
            "4096 network interfaces",
        ),
    ],
)
def test_readings_have_bounds(readings: Readings, problem: str) -> None:
    """The bound holds for every reader."""
    with pytest.raises(ValueError, match=f"more than {problem}"):
        build(readings)


@pytest.mark.parametrize(("num_gpus", "num_nics", "kept"), [(8, 300, 47278), (8, 2000, 16028), (64, 2000, 2016)])
def test_hundreds_of_virtual_functions_leave_links_out(num_gpus: int, num_nics: int, kept: int) -> None:
    """A host with too many devices for the bound on links is read; a note says which links are missing."""
    gpus = tuple(PciReading(address=f"{n:04x}:00:00.0", host_bridge="h", reports_fabric=True) for n in range(num_gpus))
    nics = tuple(
        PciReading(address=f"{n:04x}:01:00.0", host_bridge="h", interfaces=(Nic(name=f"e{n}"),))
        for n in range(num_nics)
    )
    made = build(GOOD._replace(pci=gpus + nics))
    assert len(made.links) == kept <= MAX_LINKS
    assert any("are left out" in note for note in made.notes) == (num_nics > 300)


PATHS = [
    *("topo --machine PATH", "topo --root PATH", "topo --plan PATH --machine m.json", "plan --machine PATH"),
    *("topo --save PATH --machine m.json", "topo --format svg --output PATH --machine m.json", "plan --root PATH"),
    *("doctor --root PATH", "job slurm --machine PATH train.py", "exec --local-rank 0 --plan PATH true"),
    *("job slurm --gpus-per-node 1 --output PATH train.py", "trace --read PATH", "verify PATH", "top --once PATH"),
    "bench alloc --quick --output PATH",
]


@pytest.mark.parametrize("line", PATHS)
def test_a_path_that_no_file_has_is_an_error_of_ours(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too long, with a NUL, through a file, a link to itself, a folder or a pipe instead of a file: no traceback."""
    monkeypatch.chdir(tmp_path)
    Path("m.json").write_text(json.dumps(grid(nodes=1, cores=1).to_json()))
    Path("circle").symlink_to("circle")
    bad = [LONG, f"{LONG}/x", "a\0b", "m.json/below", "circle/below"]
    if "--save" not in line and "--output" not in line:
        Path("folder").mkdir()
        os.mkfifo("pipe")
        bad += ["circle", "folder", "pipe"]
    for path in bad:
        assert refused(*(path if word == "PATH" else word for word in line.split()))
