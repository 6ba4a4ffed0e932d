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
from typing import Any

import click
import pytest

from numapin import Nic, Topology
from numapin.errors import UsageError
from tests.doctor.cases import CPU0, GPU, NODE1, THP
from tests.doctor.given import CALLS, examined, live, machine, put
from tests.doctor.seam import DoctorFinding
from tests.machines.grids import gpu, grid
from tests.recorded.screens import compare as recorded
from tests.recorded.screens import compare_answers
from tests.unit.doctor import seam
from tests.unit.doctor.seam import CHECKS, DoctorSeverity, NicKind, NvmlReadings, compare
from tests.unit.doctor.seam import live as reading

FILES = {
    "proc/cmdline": "nodes",
    f"{GPU}/iommu_group/type": "iommu",
    f"{GPU}/max_link_speed": "pcie-link",
    "proc/self/limits": "memlock",
    "proc/meminfo": "swap",
    f"{NODE1}/meminfo": "node-memory",
    "proc/sys/kernel/numa_balancing": "numa-balancing",
    f"{THP}/enabled": "huge-pages",
    f"{THP}/shmem_enabled": "shmem-huge-pages",
    f"{CPU0}/scaling_governor": "governor",
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


def _compared(topology: Topology, text: str, *, like: Topology | None = None, **answers: Any) -> DoctorFinding:
    host = seam.Host(tree=seam.Tree("/nonexistent"), topology=topology, live=live(**answers))
    findings = compare(host, seam.parse_expected(text), like=like)
    assert len({(finding.check, finding.severity, finding.why, finding.remedy) for finding in findings}) == 1
    return replace(findings[0], what="\n".join(finding.what for finding in findings))


def test_what_a_machine_must_have() -> None:
    """Counts must be the same; memory may differ by 3 %. What is unknown is not as expected."""
    topology = replace(grid(gpus=(0, 1)), memory_bytes=1 << 40)

    def answer(line: str) -> str:
        finding = _compared(topology, line)
        return f"{finding.severity}: {finding.what}"

    compare_answers(Path(__file__).with_name("expected.txt"), answer)


_NIC = Nic(
    name="mlx5_0", node=0, kind=NicKind.INFINIBAND, interface=seam.NicInterface.VERBS, is_up=True, rate_gbit_s=400.0
)


def test_what_is_unknown_is_not_as_expected() -> None:
    """It differs, and it is not expected of a host that is to be like one of which it is unknown.

    The rate of a port that is down does not count.
    """
    unknown = replace(grid(gpus=(0, 1)), memory_bytes=None, nics=(replace(_NIC, is_up=None),))
    assert _compared(unknown, "memory=1T").what == "memory: unknown instead of 1024.0 GiB"
    assert _compared(unknown, "ports=1").what == "ports: unknown instead of 1"
    no_driver = NvmlReadings(gpus=None)
    assert _compared(unknown, "driver=580", nvml=no_driver).what == "driver: unknown instead of 580"
    assert not {"memory", "ports"} & seam.counts_of(unknown).keys()
    like = replace(grid(), nics=(_NIC,))
    unread = replace(like, nics=(replace(_NIC, rate_gbit_s=None),))
    assert _compared(unread, "nodes=2", like=like).what == "mlx5_0: unknown instead of 400 Gbit/s"
    assert _compared(like, "nodes=2", like=unread).severity == "ok"
    down = replace(like, nics=(replace(_NIC, rate_gbit_s=None, is_up=False),))
    assert _compared(down, "nodes=2", like=like).severity == "ok"


def test_a_host_that_is_to_be_like_another() -> None:
    """What is missing is named, one line per difference; a model and a rate count, which are no numbers of parts."""
    nics = tuple(replace(_NIC, name=f"mlx5_{n}") for n in range(3))
    gpus = tuple(gpu(n, 0, name="NVIDIA H100") for n in range(2))
    like = replace(grid(), gpus=gpus, nics=nics, memory_bytes=1 << 40)
    expected = ",".join(
        f"{name}={number}" for name, number in seam.counts_of(like).items() if name in ("gpus", "nics", "ports")
    )
    assert _compared(like, expected, like=like).severity is DoctorSeverity.OK
    worse = replace(
        like,
        gpus=(replace(gpus[1], name="NVIDIA A100"),),
        nics=(replace(nics[0], is_up=False), replace(nics[1], rate_gbit_s=200.0)),
    )
    assert _compared(worse, expected, like=like).what.split("\n") == [
        f"gpus: 1 instead of 2 (missing: {gpus[0].pci})",
        "nics: 2 instead of 3 (missing: mlx5_2)",
        "ports: 1 instead of 3 (missing: mlx5_0, mlx5_2)",
        "models of GPUs: NVIDIA A100 instead of NVIDIA H100",
        "mlx5_1: 200 instead of 400 Gbit/s",
    ]


@pytest.mark.parametrize("number", [16, 24, 32])
def test_a_memory_module_that_is_missing(number: int) -> None:
    """It is found by a machine file, and by the nominal size, of which the kernel does not show 1.6 %."""
    like = replace(grid(), memory_bytes=int(2048 * 0.984) << 30)
    worse = replace(like, memory_bytes=int((like.memory_bytes or 0) * (1 - 1 / number)))
    for expected in (f"memory={like.memory_bytes}", "memory=2T"):
        assert _compared(like, expected).severity == "ok"
        assert _compared(worse, expected).severity == "error"


def test_models_are_compared_by_gpu() -> None:
    """A model that is unknown differs from a known one. A GPU that is missing is reported by the counts alone."""

    def machine_of(models: str) -> Topology:
        names = [None if word == "?" else word for word in models.split()]
        return replace(grid(), gpus=tuple(replace(gpu(number, 0), name=name) for number, name in enumerate(names)))

    def answer(line: str) -> str:
        host, like = map(machine_of, line.split("/"))
        return _compared(host, "nodes=2", like=like).what

    compare_answers(Path(__file__).with_name("models.txt"), answer)


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
