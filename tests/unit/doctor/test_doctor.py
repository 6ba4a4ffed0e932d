"""The doctor's checks with broken files, and the calls that read the running machine.

What each check finds is recorded: tests/recorded/doctor.txt.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import click
import pytest

from numapin import Nic, Topology
from numapin.errors import UsageError
from tests.doctor.cases import CPU0, GPU, NODE1, PORT, THP
from tests.doctor.given import CALLS, examined, live, machine, put
from tests.doctor.seam import DoctorFinding
from tests.machines.grids import gpu, grid
from tests.recorded.screens import compare as recorded
from tests.recorded.screens import compare_answers
from tests.unit.doctor import seam
from tests.unit.doctor.seam import CHECKS, DoctorSeverity, NicKind, NvmlReadings, compare, parse_expected
from tests.unit.doctor.seam import live as reading

FILES = {
    "proc/cmdline": "nodes",
    f"{GPU}/iommu_group/type": "iommu",
    f"{PORT}/max_link_speed": "pcie-link",
    "proc/self/limits": "memlock",
    "proc/meminfo": "swap",
    f"{NODE1}/meminfo": "node-memory",
    "proc/sys/kernel/numa_balancing": "numa-balancing",
    f"{THP}/enabled": "huge-pages",
    f"{THP}/shmem_enabled": "shmem-huge-pages",
    f"{CPU0}/scaling_governor": "governor",
    f"{CPU0}/scaling_driver": "governor",
    "proc/sys/kernel/osrelease": "kernel",
    "proc/version": "kernel",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DoctorFinding]:
    return examined(machine(tmp_path_factory.mktemp("sound")))


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\x00[\n", b"-1", b"9" * 5000], ids=["directory", "empty", "binary", "-1", "digits"]
)
@pytest.mark.parametrize("path", FILES)
def test_a_broken_file_is_not_a_fault(
    path: str, content: bytes | None, sound: dict[str, DoctorFinding], tmp_path: Path
) -> None:
    """A file that cannot be read or makes no sense counts as unknown or absent."""
    root, check = machine(tmp_path), FILES[path]
    put(root, {path: content})
    assert examined(root)[check].severity in (sound[check].severity, None)


def _machine(words: str) -> Topology:
    """Return a machine of models of GPUs, NICs by their rates, and memory; ? is unknown, - is not there."""
    given = {name: text.split(",") for name, text in (word.split("=") for word in words.split())}
    gpus = [replace(gpu(n, n % 2), name=None if name == "?" else name) for n, name in enumerate(given.get("gpus", ()))]
    nics = [
        Nic(
            name=f"mlx5_{number}",
            node=0,
            kind=NicKind.INFINIBAND,
            interface=seam.NicInterface.VERBS,
            is_up={"down": False, "?": None}.get(rate, True),
            rate_gbit_s=float(rate) if rate.isdecimal() else None,
        )
        for number, rate in enumerate(given.get("nics", ()))
        if rate != "-"
    ]
    memory = parse_expected(f"memory={given['memory'][0]}")["memory"] if "memory" in given else None
    here = tuple(each for each in gpus if each.name != "-")
    return replace(grid(), gpus=here, nics=tuple(nics), memory_bytes=None if memory is None else int(memory))


def _answer(line: str) -> str:
    """Compare a host with what is expected of it: counts, or `like`, which are those of a third machine."""
    expected, host, *rest = line.split(" / ")
    like = _machine(rest[0]) if rest else None
    counts = parse_expected(expected) if like is None or expected != "like" else seam.counts_of(like)
    nvml = NvmlReadings(gpus=None) if "driver=none" in host else NvmlReadings(gpus=(), driver="580.159.04")
    folder = seam.Tree("/nonexistent")
    findings = compare(seam.Host(tree=folder, topology=_machine(host), live=live(nvml=nvml)), counts, like=like)
    assert len({(finding.check, finding.severity, finding.why, finding.remedy) for finding in findings}) == 1
    return f"{findings[0].severity}: " + "\n  ".join(finding.what for finding in findings)


def test_what_a_machine_must_have() -> None:
    """Each comparison is the recorded one; NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    compare_answers(Path(__file__).with_name("expected.txt"), _answer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--only", "swap", "--skip", "kernel,swap"), "--skip leaves out each check of --only"),
        (("--expect", ""), "is empty; give a machine file, or counts such as gpus=8,nodes=2"),
        (("--expect", "cpus=1,cpus=2"), "cpus is there twice"),
        (("--expect", "idle"), "--expect idle needs the running machine"),
        (("--expect", "driver=new"), "'driver=new' is not NAME=NUMBER"),
    ],
)
def test_a_line_of_a_prolog_that_checks_nothing_is_refused(line: tuple[str, ...], message: str) -> None:
    """A prolog must not pass because a variable is empty, or because no check is left."""
    with pytest.raises((UsageError, click.UsageError), match=re.escape(message)):
        seam.doctor.main(["--root", "/", *line], standalone_mode=False)


def test_live_checks_are_skipped_on_a_capture(tmp_path: Path) -> None:
    """On a capture, each live check says why it was not made; on the running machine all are made."""
    root = machine(tmp_path)
    captured, asked = examined(root), examined(root, answers=live())
    names = {name for name, finding in captured.items() if finding.what.startswith("not checked: ")}
    assert names == {check.name for check in CHECKS if check.is_live}
    assert all(captured[name].severity is None for name in names)
    assert len(captured) == len(asked) == len(CHECKS)
    assert all(asked[name].severity is DoctorSeverity.OK for name in names)


def test_a_call_that_kills_the_child_refuses_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a filter kills the child, this process survives, and all calls count as refused."""
    monkeypatch.setitem(reading.CALLS, "mbind", lambda _node: os.kill(os.getpid(), signal.SIGKILL))
    refused = reading.try_policies(0)
    assert set(refused) == set(CALLS)
    assert all("wait status 9" in (word or "") for word in refused.values())


def test_an_impossible_node_is_refused_with_the_errno() -> None:
    """The refusal has the kernel's error name; calls that take no node still work."""
    refused = reading.try_policies(63)
    assert (refused["set_mempolicy"], refused["mbind"], refused["get_mempolicy"]) == ("EINVAL", "EINVAL", None)


def test_a_policy_that_is_not_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that accepts a policy and forgets it counts as refusing it."""
    monkeypatch.setattr(seam.numa, "set_memory_policy", lambda _mode, _nodes: None)
    assert reading.try_policies(0)["set_mempolicy"] == "accepted, but not kept"


def test_nccl_is_found_by_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of each package is found; metadata without one is "unknown"."""
    for name, text in (("cu12", "Name: nvidia-nccl-cu12\nVersion: 2.29.7\n"), ("cu13", "Name: nvidia-nccl-cu13\n")):
        folder = tmp_path / f"nvidia_nccl_{name}-2.29.7.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    found = reading.nccl_versions({})
    assert (found["nvidia-nccl-cu12"], found["nvidia-nccl-cu13"]) == ("2.29.7", "unknown")


def test_nccl_is_found_without_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of a distribution or container is found by LD_LIBRARY_PATH, then in the usual folders."""
    own, usual = tmp_path / "own", tmp_path / "usual"
    for folder, version in ((own, "2.30.4"), (usual, "2.29.7")):
        folder.mkdir()
        (folder / f"libnccl.so.{version}").touch()
        (folder / "libnccl.so.2").symlink_to(f"libnccl.so.{version}")
    monkeypatch.setattr(reading, "_NCCL_PACKAGES", ())
    monkeypatch.setattr(seam.nccl_files, "FOLDERS", [str(usual)])
    assert reading.nccl_versions({}) == {f"{usual}/libnccl.so.2.29.7": "2.29.7"}
    found = reading.nccl_versions({"LD_LIBRARY_PATH": f"/none:{own}"})
    assert found == {f"{own}/libnccl.so.2.30.4": "2.30.4"}
    monkeypatch.setattr(seam.nccl_files, "FOLDERS", [])
    assert reading.nccl_versions({}) == {}


@pytest.mark.parametrize(("text", "found"), [("7", "the kernel says '7'"), (None, "the capture has no such file")])
def test_the_example_of_a_check(text: str | None, found: str, tmp_path: Path) -> None:
    """The check that docs/extending.md shows tells text that it does not recognize from an absent file."""
    example = re.search(r"```python\n(.*?)```", PAGE.with_name("extending.md").read_text(), re.DOTALL)
    assert example is not None
    names = {**vars(seam.check), "check": lambda *_, **_given: lambda function: function}
    exec(example[1], names)  # noqa: S102 - our own text
    put(tmp_path, {} if text is None else {"proc/sys/vm/overcommit_memory": text})
    host = seam.Host(tree=seam.Tree(str(tmp_path)), topology=grid(), live=None)
    assert names["overcommit"](host).what == found


# --- the page of all checks -----------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[3] / "docs" / "checks.md"
_CODE = re.compile(
    r"(?<=: )numapin .+|[\w-]*[/_*][\w/.*{},-]*\w[*]?|\w+\.\w[\w.]*|\b[A-Z]?[a-z]+[A-Z]\w*[*]?|"
    r"nvidia-\w+-\w+\*|py-libnuma|mbind|statvfs|dlopen"
)
"""Paths, variables, calls and commands in what a check reads."""
_HEAD = """\
# The checks of numapin doctor

`numapin doctor` makes these checks, in this order, and prints for each fault the command that fixes it. It changes
nothing. Checks with a * need the running machine: on a [capture](binding.md#machine-files)
(`--root DIR`), it leaves them out, and says so.

`--only` and `--skip` also take `topology`, which stands for the notes on what could not be read of the machine.

| check | what it finds, and what that costs a job | read from |
|---|---|---|"""


def test_the_page_has_all_checks() -> None:
    """docs/checks.md has each check with what it finds, what the fault costs, and where it is read."""
    rows = []
    for check in CHECKS:
        finds = (inspect.getdoc(check.run) or "").partition("\n")[0]
        mark = " *" if check.is_live else ""
        where = _CODE.sub(lambda word: f"`{word[0]}`", check.where)
        rows.append(f"| {check.name}{mark} | {finds} {check.why} | {where} |")
    recorded("\n".join([_HEAD, *rows]) + "\n", str(PAGE))
