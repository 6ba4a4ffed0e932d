"""What every command shows is recorded beside this file; NUMAPIN_UPDATE_GOLDEN=1 records it anew.

machines/NAME.txt has the commands that show a machine, lines.txt their other options, help.txt all help pages,
errors.txt wrong command lines, doctor.txt findings, jobs.txt job scripts, jobs-refused.txt wrong ones, failures.txt how
failed jobs end. JSON of a machine is in tests/machines/golden. To record another option or wrong command line, add its
line, which begins with `===`, to lines.txt or errors.txt.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest

from numapin import Link, Nic, Topology
from tests.doctor.cases import CASES as DOCTOR
from tests.doctor.cases import finding_of
from tests.doctor.given import machine
from tests.jobs.cases import CASES as JOBS
from tests.jobs.cases import REFUSED as REFUSED_JOBS
from tests.jobs.cases import machine_files
from tests.machines.compact import compact
from tests.machines.grids import grid
from tests.machines.roots import NAMES, describe, load
from tests.pictures import golden_machine, many_nics, snc4
from tests.recorded.failures import ENDS, block
from tests.recorded.screens import HERE, Screens, compare
from tests.recorded.seam import CHECKS
from tests.recorded.seam import numapin as commands

EXAMPLES = ("dgx-a100", "dgx-h100", "gb200", "ndv4", "p4d")
HAS = "sockets=2,nodes=4,gpus=3,nics=0"
"""What the captured machine of the doctor's report has."""
BINDS = ("node", "socket", "exclusive", "core-complex")
FILES: dict[str, str | bytes] = {
    "train.py": "print('trained')\n",
    "empty.json": "",
    "cut.json": '{"schema": "numapin.topology/1", "host"',
    "other.json": '{"schema": "numapin.other/1"}',
    "cut.xml": '<?xml version="1.0"?>\n<topology version="2.0">\n<object',
    "old.xml": '<topology><object type="Machine"/></topology>',
    "plan.json": '{"schema": "numapin.plan/1", "ranks": 3}',
    "trace.json": '{"traceEvents": []}',
    "element.json": (
        '{"schema":"numapin.topology/1","host":null,"source":"x","packages":[{"id":-1}],'
        '"allowed":{"cpus":"0","nodes":"0"}}'
    ),
    "cut-nccl.xml": '<system version="1">\n<cpu numaid="0"',
    "binary": b"\x89PNG\r\n\x1a\n\xff",
}
"""The files that wrong command lines name."""
DESCRIBED = {"1pkg-4node-smt2-8amd": "hwloc", "2pkg-2node-smt2-8gpu-a100": "nccl", "3node-memory-first-2gpu": "hwloc"}
SHOWN = ("topo", "topo --format matrix", *(f"plan --bind {bind}" for bind in BINDS))


_GPU_MEMORY = golden_machine("2pkg-34node-gpumem-4gpu")
_NCCL = golden_machine("2pkg-2node-8gpu-4nic.nccl")


def _linked(*kinds: str) -> Topology:
    """Return a machine whose GPU 0 has these links to GPU 1, 2 and so on, and no other link is known."""
    links = tuple(Link(a="gpu0", b=f"gpu{n}", kind=kind) for n, kind in enumerate(kinds, 1))
    return replace(grid(gpus=[0] * (len(kinds) + 1)), links=links)


MADE = {
    "made-l3-over-nodes": snc4(),
    "made-two-l3": grid(l3=2),
    "made-one-empty-node": grid(nodes=2, memory_nodes=[2], memoryless=[2]),
    "made-gpu-memory-of-unknown-gpus": replace(
        _GPU_MEMORY,
        gpus=tuple(replace(gpu, memory_node=2 if gpu.index < 2 else None) for gpu in _GPU_MEMORY.gpus),
    ),
    "made-many-nics": many_nics(),
    "made-gpus-without-address": replace(
        grid(gpus=[0] * 13), gpus=tuple(replace(gpu, pci=None) for gpu in grid(gpus=[0] * 13).gpus)
    ),
    "made-facts-that-differ": replace(
        _NCCL,
        gpus=(
            replace(_NCCL.gpus[0], name="NVIDIA B200", cuda_index=None, visible=False, node=None, node_source=None),
            *_NCCL.gpus[1:],
        ),
        nics=(Nic(name="a", node=0, rate_gbit_s=400.0), Nic(name="b", node=0, is_up=False)),
    ),
    "made-a-long-name": replace(grid(gpus=[0]), nics=(Nic(name="a_very_long_name_of_a_network_device_" * 3, node=0),)),
    "made-links": _linked("NV12", "NV", "XGMI4", "XGMI", "XELINK", "PIX", "PXB", "PHB", "NODE", "SYS"),
}
"""Machines with facts that no machine of tests/machines has."""


@pytest.fixture(scope="session")
def screens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Screens]:
    found = Screens(tmp_path_factory.mktemp("screens"))
    yield found
    found.forker.close()


@pytest.mark.parametrize("name", [*NAMES, *MADE])
def test_a_machine(name: str, screens: Screens) -> None:
    """A machine's tree, matrix and plans are the recorded ones."""
    machine = MADE[name] if name in MADE else golden_machine(name)
    screens.write("machine.json", json.dumps(machine.to_json()))
    compare(_recorded(screens, "machine.json"), f"machines/{name}.txt")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, screens: Screens) -> None:
    """What a built-in machine shows is recorded, with the JSON of its plan."""
    plan = screens.run(["plan", "--json", "--machine", f"example:{name}"])[1]
    text = f"{_recorded(screens, f'example:{name}')}=== plan --json\n{compact(json.loads(plan))}"
    compare(text, f"machines/example-{name}.txt")


def _recorded(screens: Screens, machine: str) -> str:
    return "".join(screens.record([*command.split(), "--machine", machine]) for command in SHOWN)


def _again(screens: Screens, name: str) -> str:
    """Run the command lines of a recorded file, and return what they show now."""
    lines = re.findall(r"^=== numapin (.*)$", (HERE / name).read_text(), re.MULTILINE)
    assert lines
    return "".join(screens.record(shlex.split(line)) for line in lines)


def test_a_traceback_is_not_recorded(screens: Screens, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that crashes fails its test, also with NUMAPIN_UPDATE_GOLDEN=1."""
    monkeypatch.setattr(screens, "run", lambda _words: (1, "", "Traceback (most recent call last):\nKeyError: '#$'\n"))
    with pytest.raises(AssertionError, match="numapin job sge"):
        screens.record(["job", "sge"])


def test_every_record_belongs_to_a_machine() -> None:
    """No record is left behind by a machine that was renamed."""
    wanted = {*NAMES, *(f"example-{name}" for name in EXAMPLES), *MADE}
    assert {path.stem for path in (HERE / "machines").iterdir()} == wanted


def test_help(screens: Screens) -> None:
    """The help of every command, of every subcommand, and of `numapin` alone fits a terminal of 80 columns."""
    lines = [[], ["--version"], *([*path, "--help"] for path in _paths(commands, ())), ["run", "--help-all"]]
    text = "".join(screens.record(line) for line in lines)
    compare(text, "help.txt")
    assert [line for line in text.splitlines() if len(line) > 80] == []


def _paths(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _paths(found, (*path, name))


def test_lines(screens: Screens) -> None:
    """Options of topo and plan: plans on a machine, NICs, and what --strict refuses because a file leaves it open."""
    screens.write("no-nic.json", json.dumps(golden_machine("2pkg-2node-smt2-8gpu-h100").to_json()))
    for name, kind in DESCRIBED.items():
        screens.write(f"{name}.xml", describe(load(name), kind))
    two = ["plan", "--json", "--machine", "example:dgx-a100", "--nproc-per-node", "2", "--bind", "exclusive"]
    screens.write("two.json", screens.run(two)[1])
    compare(_again(screens, "lines.txt"), "lines.txt")


def test_errors(screens: Screens) -> None:
    """Each wrong command line ends with the recorded message, hint and status, and writes no file."""
    for name, content in FILES.items():
        screens.write(name, content)
    before = set(screens.folder.iterdir())
    compare(_again(screens, "errors.txt"), "errors.txt")
    assert set(screens.folder.iterdir()) == before


def test_jobs(screens: Screens) -> None:
    """Job scripts of every form, with their warnings."""
    files = {name: f"{name}.json" for name in machine_files(screens.folder)}
    lines = [shlex.split(f"job {line.format(**files)}") for line in JOBS.values()]
    compare("".join(screens.record(line) for line in lines), "jobs.txt")
    before = set(screens.folder.iterdir())
    wrong = [
        shlex.split(f"job {line.format(**files)} {options} --output job.out")
        for line, each in REFUSED_JOBS.items()
        for options in each
    ]
    compare("".join(screens.record([*line, "train.py"]) for line in wrong), "jobs-refused.txt")
    assert set(screens.folder.iterdir()) == before, "a line of REFUSED is not refused: it has no status in the file"


def test_doctor(screens: Screens, tmp_path: Path) -> None:
    """The report on a capture, and what each check finds on sound and faulty machines, with each of its results."""
    machine(screens.folder, "4node-cpuset-3gpu")
    shown = (
        "",
        "--only nodes,pcie-link --fail-on note",
        "--skip cpuset --expect example:dgx-a100",
        f"--only nodes --expect {HAS}",
    )
    lines = [screens.record(["doctor", "--root", "root", *options.split()]) for options in shown]
    results = {
        (check.name, result)
        for check in CHECKS
        for result in re.findall(r"\b(error|warning|note|ok|unknown)\(", inspect.getsource(inspect.unwrap(check.run)))
    }
    for number, case in enumerate(DOCTOR):
        folder = tmp_path / str(number)
        folder.mkdir()
        finding = finding_of(case, folder)
        remedy = f"  fix: {finding.remedy}\n" if finding.remedy else ""
        severity = finding.severity or "unknown"
        lines.append(f"=== {case.check}: {case.label}\n{severity}: {finding.what}\n{remedy}")
        results.discard((case.check, severity))
    assert not results, f"add a Case to tests/doctor/cases.py for each of {sorted(results)}"
    compare("".join(lines), "doctor.txt")


def test_failures() -> None:
    """The block at the end of each made failure."""
    blocks = ("\n".join(block(*end.ranks, **end.facts)) for end in ENDS.values())
    compare("".join(f"=== {name}\n{text}\n" for name, text in zip(ENDS, blocks, strict=True)), "failures.txt")
