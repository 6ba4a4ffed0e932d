"""`numapin verify` on a machine with two nodes: it holds under `numapin run`, else the right finding appears.

The first rank of one job verifies itself while it violates its plan; the other job is not bound.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.vm.machine import GPUS, HERE, SHARE, Job, cache, compare, publish

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

PROBE = HERE / "verify_probe.py"
RUN = (sys.executable, "-m", "numapin", "run", "--verify-after", "3", "--report")
REGION_MIB = 64
LOOKS = {
    "green": "numapin verify                # as started",
    "thread": "numapin verify                # a thread moved to CPU 4",
    "restored": "",
    "squeezed": "numapin verify                # rank 0 narrowed to CPU 0",
    "widened": "",
    "pages": "numapin verify                # all pages of rank 0 migrated from node 0 to node 1",
    "unbound": "numapin verify --pid PID      # plain python with LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
}
"""What a probe does before each look, as the published results show it; those without a text are not published."""


_SHOWN = {**GPUS, **({"PROBE_TEXTS": "1"} if "NUMAPIN_RESULTS" in os.environ else {})}
_RANK = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
JOBS = {
    "two-nodes": [
        Job(name="verify-run", argv=[*RUN, SHARE / "verify-run" / "report.json", PROBE], env=_SHOWN),
        Job(name="verify-alone", argv=[sys.executable, PROBE, "self"], env={**_SHOWN, **_RANK}),
    ]
}


def _job_of(look: str) -> str:
    return "verify-alone" if look == "unbound" else "verify-run"


@pytest.mark.parametrize("name", LOOKS)
def test_the_findings_of_a_look(two_nodes: VmResult, name: str) -> None:
    """The status and each rank's findings are the recorded ones, with their remedies.

    Nothing is found as started, after the remedy for a thread that moved to the other node, and after that for a rank
    which narrowed itself. Migrated pages, and a rank that plain python started, are errors. Of small kinds of memory
    the kernel may move or leave some, so only anonymous memory is recorded.
    """
    found = two_nodes.report(_job_of(name), f"{name}.json")
    report = found["report"]
    words = {r"--pid \d+": "--pid PID", rf"\S*{report['run']}": "RUN", r"[\d.]+ MiB": "N MiB", r"[\d.]+%": "N%"}
    ranks = []
    for rank in report["ranks"]:
        findings = [each for each in rank["findings"] if "memory (" not in each["what"] or "anonymous" in each["what"]]
        texts = [f"{each['severity']}: {each['what']}; {each['remedy']}" for each in findings]
        for pattern, word in words.items():
            texts = [re.sub(pattern, word, text) for text in texts]
        applied = rank["applied"] and rank["applied"]["cpus"]
        requested = f"{rank['requested']['cpus']} for GPU {rank['requested']['gpu']['index']}"
        ranks.append({"requested": requested, "applied": applied, "findings": texts})
    compare("verify", name, {"status": found["status"], "holds": report["holds"], "ranks": ranks})


def test_bound_job_is_green(two_nodes: VmResult) -> None:
    """Under numapin run threads, policies and the 64 MiB of each rank are as planned, and the table says so."""
    report = two_nodes.report("verify-run", "green.json")["report"]
    for rank, node in zip(report["ranks"], ("0", "1"), strict=True):
        (process, *_) = rank["observed"]["processes"]
        assert rank["applied"]["memory"] == "preferred"
        assert process["policy"] == f"prefer:{node}"
        anonymous = [pages["bytes_by_node"] for pages in process["memory"] if pages["kind"] == "anonymous"]
        assert sum(pages[node] for pages in anonymous) >= REGION_MIB << 20
        assert [thread["cpus"] for thread in process["threads"]] == [("0-3", "4-7")[int(node)]] * 2
    lines = (two_nodes.jobs["verify-run"].out / "green.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["rank", "0", "1"]
    assert [line.split()[-1] for line in lines[1:3]] == ["ok", "ok"]
    assert max(map(len, lines)) <= 115


def test_migrated_pages_have_their_amount(two_nodes: VmResult) -> None:
    """After migrate_pages, the finding has at least the megabytes that the probe allocated."""
    report = two_nodes.report("verify-run", "pages.json")["report"]
    (text,) = [each["what"] for each in report["ranks"][0]["findings"] if "anonymous memory" in each["what"]]
    assert float(text.partition("elsewhere: ")[2].split()[0]) >= REGION_MIB


def test_report_of_the_run(two_nodes: VmResult) -> None:
    """--report has both ranks' requested, applied and observed bindings, and the launcher prints one line."""
    job, report = two_nodes.jobs["verify-run"], two_nodes.found("verify-run", "report.json")
    assert (report["schema"], len(report["ranks"])) == ("numapin.report/1", 2)
    for rank in report["ranks"]:
        assert rank["requested"]["cpus"] == rank["applied"]["cpus"]
        assert rank["observed"]["processes"][0]["pid"] == rank["pid"]
    assert "numapin: verified: the plan " in job.stderr, job.shown()
    if "NUMAPIN_RESULTS" not in os.environ:
        return
    made = json.loads((cache() / "ready.json").read_text())
    parts = [f"two-nodes, {made['qemu']}, {made['kernel']}: numapin run verify_probe.py\n"]
    for name, command in LOOKS.items():
        if command:
            parts.append(f"\n$ {command}\n{(two_nodes.jobs[_job_of(name)].out / f'{name}.txt').read_text()}")
    publish("vm-verify-two-nodes.txt", "".join(f"{line.rstrip()}\n" for line in "".join(parts).splitlines()))
