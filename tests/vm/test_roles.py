"""`numapin run --cores-for` on a machine with two nodes: the kernel's masks of every role are those of the plan."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, SHARE, TEST_LIMIT_S, Job, VmResult

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

RUN = (sys.executable, "-m", "numapin", "run", "--cores-for")
PLANNED = (
    {"main": "0-1", "optimizer": "2", "loader": "3"},
    {"main": "4-5", "optimizer": "6", "loader": "7"},
)


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the jobs for the two-node machine: the probe with roles, and roles for which there are too few cores."""
    if machine != "two-nodes-again":
        return []
    shown = gpus.shown(machine, nvml)
    run_dir = {"NUMAPIN_RUN_DIR": str(SHARE / "roles")}
    probe = HERE / "roles_probe.py"
    return [
        Job(name="roles", argv=[*RUN, "loader=1,optimizer=1", probe], env={**shown, **run_dir}),
        Job(name="roles-too-many", argv=[*RUN, "loader=2,optimizer=2", probe], env=shown),
    ]


def _found(result: VmResult, name: str) -> dict[str, Any]:
    job = result.jobs["roles"]
    assert job.status == 0, job.shown()
    found = job.json(f"{name}.json")
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_masks_are_as_planned(two_nodes_again: VmResult, rank: int) -> None:
    """Main thread, threads that it starts, torch's threads and all threads of workers have their role's CPUs."""
    found, planned = _found(two_nodes_again, str(rank)), PLANNED[rank]
    assert found["first"] == [planned["main"]]
    assert found["torch_threads"] == 2
    assert found["masks"][0] == found["later"] == planned["main"]
    assert set(found["masks"]) == {planned["main"], planned["optimizer"]}
    assert found["masks"].count(planned["optimizer"]) == 1
    for kind in ("torch", "numapin"):
        masks = {mask for worker in found["workers"][kind] for mask in worker}
        assert masks == {planned["loader"]}, kind


def test_plan_has_the_roles(two_nodes_again: VmResult) -> None:
    """plan.json has each role's CPUs, and the reason."""
    _found(two_nodes_again, "0")
    (path,) = two_nodes_again.jobs["roles"].out.glob("**/plan.json")
    for rank, planned in zip(json.loads(path.read_text())["ranks"], PLANNED, strict=True):
        assert rank["roles"] == planned
        assert "cores by role: 1 for the loader, 1 for the optimizer, 2 for the main thread" in rank["reason"]


def test_verify_checks_each_role(two_nodes_again: VmResult) -> None:
    """As started, the plan holds, with a note of the threads of each role; a main thread that has moved is an error."""
    found = _found(two_nodes_again, "green")
    assert found["report"] is not None, found["stderr"]
    assert (found["status"], found["report"]["holds"]) == (0, True), found["report"]
    (note,) = [finding for finding in found["report"]["ranks"][0]["findings"] if "threads by role" in finding["what"]]
    assert "optimizer 1, loader " in note["what"]
    moved = _found(two_nodes_again, "moved")
    assert moved["status"] == 1
    (error,) = [finding for finding in moved["report"]["ranks"][0]["findings"] if finding["severity"] == "error"]
    assert error["what"].endswith("of the rank may run on CPUs 2; planned: 0-1")


def test_too_few_cores_is_one_error(two_nodes_again: VmResult) -> None:
    """Roles that leave no core for the main thread end the command before a rank starts."""
    job = two_nodes_again.jobs["roles-too-many"]
    assert job.status == 4, job.shown()
    assert "--cores-for loader=2,optimizer=2 leaves no core for the main thread" in job.stderr
    assert not list(job.out.glob("[0-9].json"))
