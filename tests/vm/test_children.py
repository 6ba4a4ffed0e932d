"""`numapin exec --children` on a machine with two nodes: the processes that a program starts are bound to their GPUs.

The tests check the kernel's reports that each process collected about itself: threads, policies, pages.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tests.vm.machine import GPUS, HERE, SHARE, Job, compare

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

STAND_IN = HERE.parent / "children" / "stand_in"
EXEC = (sys.executable, "-m", "numapin", "exec", "--children", "--verbose")
CPUS = ("0-3", "4-7")
BEFORE_MIB = 24
WAYS = ("spawn", "fork", "forkserver")
UNBOUND = ("driver", "engine", "early", "waiting-started")
"""Processes that never take a GPU, or have not yet."""
BOUND = (
    *(f"{way}-{rank}{more}" for way in WAYS for rank in (0, 1) for more in ("", "-loader")),
    *("spawn-1-helper", "engine-1", "visible", "rank", "asked"),
    *("both", "follower", "late", "waiting"),
)


def job_of(name: str, probe: str, *arguments: str, options: tuple[str, ...] = (), **changes: Any) -> Job:
    """Return the job that runs a probe under `numapin exec --children`, with the stand-in for torch."""
    environ = {**GPUS, "PYTHONPATH": f"{STAND_IN}:{HERE.parents[1]}", "NUMAPIN_RUN_DIR": str(SHARE / name)}
    argv = (*EXEC, *options, "--", sys.executable, str(HERE / probe), *arguments)
    return Job(name=name, argv=argv, **{"env": environ | changes.pop("env", {}), **changes})


JOBS = {
    "two-nodes-again": [
        job_of("children", "children_probe.py"),
        job_of("children-strict", "children_probe.py", options=("--strict",), refuse_policy=True),
    ]
}


def _found(result: VmResult, name: str) -> Any:
    return result.found("children", f"{name}.json")


def test_every_process_is_where_its_gpu_is(two_nodes_again: VmResult) -> None:
    """The CPUs, the policy and the new pages of each process are the recorded ones.

    Workers of multiprocessing are bound at set_device with all their threads, those of an engine too, whose thread sets
    the device; what they start follows them. One visible GPU or a local rank binds before torch is imported. A plan of
    the process itself may leave the node, and a second GPU changes nothing. What never takes a GPU keeps its CPUs.
    """
    seen = {}
    for name in (*BOUND, *UNBOUND):
        found = _found(two_nodes_again, name)
        (cpus,) = {thread["cpus"] for thread in found["threads"]}  # all threads have the same
        policy = " ".join([found["policy"]["mode"], *map(str, found["policy"]["nodes"])])
        # New memory is on the node of the CPUs, also that of a thread which is older than the binding.
        pages = [found["pages"], *([found["older_thread"]] if "older_thread" in found else [])]
        if cpus in CPUS:
            assert pages == [{str(CPUS.index(cpus)): 8192}] * len(pages), name
        at_start = {"torch imported": found["at_start_of_torch"]} if "at_start_of_torch" in found else {}
        seen[name] = {"cpus": cpus, "policy": policy, "bound": found["binding"] is not None, **at_start}
        assert len(found["threads"]) >= (4 if name in {f"{way}-{rank}" for way in WAYS for rank in (0, 1)} else 1)
    compare("children", "processes", seen)


def test_what_the_command_tells(two_nodes_again: VmResult) -> None:
    """A process with GPUs of several nodes is reported once; a late binding, with what was allocated before it.

    Reported by others as TensorRT-LLM#18117.
    """
    text = two_nodes_again.jobs["children"].stderr
    assert text.count("uses GPUs of several nodes (GPU 1, GPU 0)") == 1
    pid = _found(two_nodes_again, "spawn-1")["pid"]
    (line,) = [line for line in text.splitlines() if f"process {pid} " in line]
    assert "is bound to GPU 1 (torch.cuda.set_device(1)): CPUs 4-7, memory preferred 1" in line
    amount = float(line.partition(" MiB were allocated before")[0].split()[-1])
    assert BEFORE_MIB < amount < 4 * BEFORE_MIB
    assert line.endswith("100% of it on other nodes")


def test_verify_sees_the_processes(two_nodes_again: VmResult) -> None:
    """`numapin verify` finds the run and compares each process with its GPU; memory from before is what it reports."""
    ranks = two_nodes_again.report("children", "verify.json")["report"]["ranks"]
    assert [rank["pid"] for rank in ranks] == [_found(two_nodes_again, f"spawn-{rank}")["pid"] for rank in (0, 1)]
    assert [rank["applied"]["cpus"] for rank in ranks] == list(CPUS)
    assert not ranks[0]["findings"]
    assert all("of the anonymous memory" in finding["what"] for finding in ranks[1]["findings"])


def test_strict_refuses_before_anything_starts(two_nodes_again: VmResult) -> None:
    """With --strict a policy that seccomp refuses gives status 5, and the command does not start."""
    job = two_nodes_again.jobs["children-strict"]
    assert job.status == 5, job.shown()
    assert not list(job.out.glob("*driver*"))
    assert "seccomp forbids it" in job.stderr
