"""What every command shows is recorded beside this file; NUMAPIN_UPDATE_GOLDEN=1 records it anew.

machines/NAME.txt has the commands that show a machine, lines.txt their other options, help.txt all help pages,
errors.txt wrong command lines, doctor.txt findings, jobs.txt job scripts, jobs-refused.txt wrong ones, failures.txt how
failed jobs end. JSON of a machine is in tests/machines/golden.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import click
import pytest

from tests.doctor.cases import CASES as DOCTOR
from tests.doctor.cases import finding_of
from tests.doctor.given import machine
from tests.jobs.cases import CASES as JOBS
from tests.jobs.cases import MACHINES as JOB_MACHINES
from tests.jobs.cases import REFUSED as REFUSED_JOBS
from tests.machines.compact import compact
from tests.machines.roots import HERE as MACHINES
from tests.machines.roots import NAMES, describe, load
from tests.recorded.errors import FILES, WRONG
from tests.recorded.failures import ENDS, block
from tests.recorded.made import MADE
from tests.recorded.screens import HERE, Screens, compare
from tests.recorded.seam import numapin as commands

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES = ("dgx-a100", "dgx-h100", "gb200", "ndv4", "p4d")
HAS = "sockets=2,nodes=4,gpus=3,nics=0"
"""What the captured machine of the doctor's report has."""
BINDS = ("node", "socket", "exclusive", "core-complex")
LINES = (
    "topo --machine example:",
    "topo --machine example:dgx-a100 --plan",
    "topo --machine example:dgx-a100 --plan two.json",
    "topo --machine no-nic.json --plan two.json",
    "plan --machine no-nic.json --nic-env ucx",
    "plan --machine no-nic.json --nic-env ucx --json",
    "plan --machine no-nic.json --nic-env ucx --strict",
    "plan --machine 1pkg-4node-smt2-8amd.xml --strict",
    "plan --machine 2pkg-2node-smt2-8gpu-a100.xml --strict",
    "plan --machine 3node-memory-first-2gpu.xml --strict",
    "help topo",
)
DESCRIBED = {"1pkg-4node-smt2-8amd": "hwloc", "2pkg-2node-smt2-8gpu-a100": "nccl", "3node-memory-first-2gpu": "hwloc"}
SHOWN = ("topo", "topo --format matrix", *(f"plan --bind {bind}" for bind in BINDS))


@pytest.fixture(scope="session")
def screens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Screens]:
    """Give terminals for commands."""
    found = Screens(tmp_path_factory.mktemp("screens"))
    yield found
    found.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_machine(name: str, screens: Screens) -> None:
    """A machine's tree, matrix and plans are the recorded ones, and its JSON is the golden one."""
    golden = _golden(name)
    screens.write("machine.json", json.dumps(golden["topology"]))
    compare(_recorded(screens, "machine.json"), f"machines/{name}.txt")
    texts = [screens.run([*command.split(), "--json", "--machine", "machine.json"])[1] for command in SHOWN[2:6]]
    assert [json.loads(text) for text in texts] == [saved["plan"] for saved in golden["plans"][:4]]
    assert json.loads(screens.run(["topo", "--json", "--machine", "machine.json"])[1]) == golden["topology"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, screens: Screens) -> None:
    """What a built-in machine shows is recorded, with the JSON of its plan."""
    plan = screens.run(["plan", "--json", "--machine", f"example:{name}"])[1]
    text = f"{_recorded(screens, f'example:{name}')}=== plan --json\n{compact(json.loads(plan))}"
    compare(text, f"machines/example-{name}.txt")


@pytest.mark.parametrize("name", MADE)
def test_a_made_machine(name: str, screens: Screens) -> None:
    """A made machine is shown as recorded."""
    screens.write("machine.json", json.dumps(MADE[name].to_json()))
    compare(_recorded(screens, "machine.json"), f"machines/made-{name}.txt")


def _golden(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((MACHINES / "golden" / f"{name}.json").read_text())
    return golden


def _recorded(screens: Screens, machine: str) -> str:
    return "".join(screens.record([*command.split(), "--machine", machine]) for command in SHOWN)


def test_every_record_belongs_to_a_machine() -> None:
    """No record is left behind by a machine that was renamed."""
    wanted = {*NAMES, *(f"example-{name}" for name in EXAMPLES), *(f"made-{name}" for name in MADE)}
    assert {path.stem for path in (HERE / "machines").iterdir()} == wanted


def test_help(screens: Screens) -> None:
    """The help of every command, of every subcommand, and of `numapin` alone."""
    lines = [[], ["--version"], *([*path, "--help"] for path in _paths(commands, ())), ["run", "--help-all"]]
    compare("".join(screens.record(line) for line in lines), "help.txt")


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
    screens.write("no-nic.json", json.dumps(_golden("2pkg-2node-smt2-8gpu-h100")["topology"]))
    for name, kind in DESCRIBED.items():
        screens.write(f"{name}.xml", describe(load(name), kind))
    two = ["plan", "--json", "--machine", "example:dgx-a100", "--nproc-per-node", "2", "--bind", "exclusive"]
    screens.write("two.json", screens.run(two)[1])
    compare("".join(screens.record(line.split()) for line in LINES), "lines.txt")


def test_errors(screens: Screens) -> None:
    """Each wrong command line ends with the recorded message, hint and status, and writes no file."""
    for name, content in FILES.items():
        screens.write(name, content)
    before = screens.files()
    compare("".join(screens.record(shlex.split(line)) for line in WRONG), "errors.txt")
    assert screens.files() == before


def test_jobs(screens: Screens) -> None:
    """Job scripts of every form, with their warnings."""
    files = {name: f"{name}.json" for name in JOB_MACHINES}
    for name, golden in JOB_MACHINES.items():
        screens.write(files[name], json.dumps(_golden(golden)["topology"]))
    lines = [shlex.split(f"job {line.format(**files)}") for line in JOBS.values()]
    compare("".join(screens.record(line) for line in lines), "jobs.txt")
    before = screens.files()
    wrong = [
        shlex.split(f"job {line.format(**files)} {options} --output job.out")
        for line, each in REFUSED_JOBS.items()
        for options in each
    ]
    compare("".join(screens.record([*line, "train.py"]) for line in wrong), "jobs-refused.txt")
    assert screens.files() == before


def test_doctor(screens: Screens, tmp_path: Path) -> None:
    """The report on a capture, and what each check finds on sound and faulty machines."""
    machine(screens.folder, "4node-cpuset-3gpu")
    shown = (
        "",
        "--only nodes,smt --fail-on note",
        "--skip cpuset --expect example:dgx-a100",
        f"--only nodes --expect {HAS}",
    )
    lines = [screens.record(["doctor", "--root", "root", *options.split()]) for options in shown]
    for number, case in enumerate(DOCTOR):
        folder = tmp_path / str(number)
        folder.mkdir()
        finding = finding_of(case, folder)
        remedy = f"  fix: {finding.remedy}\n" if finding.remedy else ""
        lines.append(f"=== {case.check}: {case.label}\n{finding.severity or 'unknown'}: {finding.what}\n{remedy}")
    compare("".join(lines), "doctor.txt")


def test_failures() -> None:
    """The block at the end of each made failure."""
    blocks = ("\n".join(block(*end.ranks, **end.facts)) for end in ENDS.values())
    compare("".join(f"=== {name}\n{text}\n" for name, text in zip(ENDS, blocks, strict=True)), "failures.txt")
