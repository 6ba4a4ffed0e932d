"""`numapin verify` on a machine with two nodes: it holds under `numapin run`, else the right finding appears.

The first rank of one job verifies itself while it violates its plan; the other job is not bound.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, SHARE, TEST_LIMIT_S, Job, VmResult, cache

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

PROBE = HERE / "verify_probe.py"
RUN = (sys.executable, "-m", "numapin", "run", "--verify-after", "3", "--report")
REGION_MIB = 64
LOOKS = (
    ("green", "verify-run", "numapin verify                # as started"),
    ("thread", "verify-run", "numapin verify                # a thread moved to CPU 4"),
    ("squeezed", "verify-run", "numapin verify                # rank 0 narrowed to CPU 0"),
    ("pages", "verify-run", "numapin verify                # all pages of rank 0 migrated from node 0 to node 1"),
    ("unbound", "verify-alone", "numapin verify --pid PID      # plain python with LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"),
)


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the jobs for the two-node machine: the probe under numapin, and alone."""
    if machine != "two-nodes":
        return []
    shown = gpus.shown(machine, nvml)
    rank = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    return [
        Job(name="verify-run", argv=[*RUN, SHARE / "verify-run" / "report.json", PROBE], env=shown),
        Job(name="verify-alone", argv=[sys.executable, PROBE, "self"], env={**shown, **rank}),
    ]


def _look(result: VmResult, name: str, *, job: str = "verify-run") -> tuple[int, dict[str, Any]]:
    """Return the status and the report of one `numapin verify`."""
    assert result.jobs[job].status == 0, result.jobs[job].shown()
    found = result.jobs[job].json(f"{name}.json")
    assert isinstance(found, dict)
    assert found["report"] is not None, found["stderr"]
    return found["status"], found["report"]


def _errors(report: dict[str, Any]) -> dict[int, list[dict[str, str]]]:
    """Return the findings of each rank, all of which must be errors here."""
    found = {rank["local_rank"]: rank["findings"] for rank in report["ranks"]}
    assert {finding["severity"] for findings in found.values() for finding in findings} <= {"error"}
    return found


def test_bound_job_is_green(two_nodes: VmResult) -> None:
    """Under numapin run there are no findings: threads, policies and the 64 MiB of each rank are as planned."""
    status, report = _look(two_nodes, "green")
    assert (status, report["holds"], _errors(report)) == (0, True, {0: [], 1: []})
    for rank, node in zip(report["ranks"], ("0", "1"), strict=True):
        (process, *_) = rank["observed"]["processes"]
        assert rank["applied"]["memory"] == "preferred"
        assert process["policy"] == f"prefer:{node}"
        anonymous = [pages["bytes_by_node"] for pages in process["memory"] if pages["kind"] == "anonymous"]
        assert sum(pages[node] for pages in anonymous) >= REGION_MIB << 20
        assert len(process["threads"]) == 2
        assert {thread["cpus"] for thread in process["threads"]} == {("0-3", "4-7")[int(node)]}


def test_table_of_a_green_job(two_nodes: VmResult) -> None:
    """The table has one row per correct rank, and fits a terminal of 100 columns."""
    assert two_nodes.jobs["verify-run"].status == 0, two_nodes.jobs["verify-run"].shown()
    lines = (two_nodes.jobs["verify-run"].out / "green.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["rank", "0", "1"]
    assert [line.split()[-1] for line in lines[1:3]] == ["ok", "ok"]
    assert max(map(len, lines)) <= 115


def test_moved_thread_is_found(two_nodes: VmResult) -> None:
    """A thread on a CPU of the other node is an error of its rank, with the command that moves it back."""
    status, report = _look(two_nodes, "thread")
    errors = _errors(report)
    assert (status, report["holds"], errors[1]) == (1, False, [])
    (finding,) = errors[0]
    assert finding["what"].endswith("of the rank may run on CPUs 4; planned: 0-3")
    assert f"bind it again with: numapin attach --job {report['run']}" in finding["remedy"]
    assert _look(two_nodes, "restored")[0] == 0


def test_squeezed_rank_is_found(two_nodes: VmResult) -> None:
    """A rank that its program narrowed to one of its CPUs, before it started a process, is an error of that rank."""
    status, report = _look(two_nodes, "squeezed")
    errors = _errors(report)
    assert (status, report["holds"], errors[1]) == (1, False, [])
    (finding,) = errors[0]
    assert finding["what"] == "the main thread may run on CPUs 0 only; planned: 0-3"
    assert finding["remedy"].endswith(f"numapin attach --job {report['run']} --widen")
    assert _look(two_nodes, "widened")[0] == 0


def test_migrated_pages_are_found(two_nodes: VmResult) -> None:
    """After migrate_pages the anonymous memory is an error, with its amount, its node, and how to move it back."""
    status, report = _look(two_nodes, "pages")
    errors = _errors(report)
    assert (status, report["holds"], errors[1]) == (1, False, [])
    (finding,) = [finding for finding in errors[0] if "anonymous memory" in finding["what"]]
    assert "MiB on node 1; planned: node 0" in finding["what"]
    assert float(finding["what"].partition("elsewhere: ")[2].split()[0]) >= REGION_MIB
    assert finding["remedy"].endswith(f"numapin attach --job {report['run']} --migrate")
    assert not [finding for finding in errors[0] if "CPUs" in finding["what"]]


def test_unbound_job_is_found(two_nodes: VmResult) -> None:
    """A process started by plain python as rank 1 of 2 is compared with numapin's plan for it, on node 1."""
    status, report = _look(two_nodes, "unbound", job="verify-alone")
    (rank,) = report["ranks"]
    assert (status, report["holds"], rank["local_rank"], rank["applied"]) == (1, False, 1, None)
    assert (rank["requested"]["cpus"], rank["requested"]["gpu"]["index"]) == ("4-7", 1)
    unbound, policy = _errors(report)[1][:2]
    assert unbound["what"].startswith("not bound: ")
    assert unbound["what"].endswith("threads may run on CPUs 0-7; planned: 4-7")
    assert policy["what"] == "the memory policy of the rank is default; planned: preferred 1"
    assert "numapin run" in policy["remedy"]


def test_report_of_the_run(two_nodes: VmResult) -> None:
    """--report has both ranks' requested, applied and observed bindings, and the launcher prints one line."""
    job = two_nodes.jobs["verify-run"]
    assert job.status == 0, job.shown()
    report: Any = job.json("report.json")
    assert (report["schema"], len(report["ranks"])) == ("numapin.report/1", 2)
    for rank in report["ranks"]:
        assert rank["requested"]["cpus"] == rank["applied"]["cpus"]
        assert rank["observed"]["processes"][0]["pid"] == rank["pid"]
    assert "numapin: verified: the plan " in job.stderr, job.shown()
    if folder := os.environ.get("NUMAPIN_RESULTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        made = json.loads((cache() / "ready.json").read_text())
        parts = [f"two-nodes, {made['qemu']}, {made['kernel']}: numapin run verify_probe.py\n"]
        for name, of, command in LOOKS:
            parts.append(f"\n$ {command}\n{(two_nodes.jobs[of].out / name).with_suffix('.txt').read_text()}")
        lines = "".join(parts).splitlines()
        (Path(folder) / "vm-verify-two-nodes.txt").write_text("".join(f"{line.rstrip()}\n" for line in lines))
