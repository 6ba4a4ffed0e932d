"""`numapin exec` as launchers start it, and what the kernel reports of the command that it becomes."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.launching import DUMP, NUMAPIN, REFUSE_POLICY, Done, call, environment, forked, script, torchrun
from tests.integration.launching import numapin as run_numapin
from tests.integration.seam import cpu_set
from tests.needs import needs_two_cpus

if TYPE_CHECKING:
    from tests.nvml.fake import FakeNvml

CLICK = (*NUMAPIN, "--local_rank=1")
"""As deepspeed starts it: the first word is not "exec", so that click reads the line."""

CPUS = sorted(os.sched_getaffinity(0))
LAST = CPUS[-1]
TASK = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHS = {"RANK": "3", "TORCHELASTIC_RUN_ID": "job"}
STEP = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
MPI = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.fixture
def dump(tmp_path: Path) -> tuple[str, ...]:
    """Give a command that prints its environment and its binding as the kernel reports it."""
    return ("--", sys.executable, script(tmp_path, DUMP))


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """Give a plan of two ranks with one CPU each."""
    path = tmp_path / "plan.json"
    path.write_text(forked("plan", "--nproc-per-node", "2", "--bind", "exclusive", "--json").out)
    return str(path)


def start(*command: str, **changes: str) -> Done:
    return call(*command, cwd=None, **changes)


def enter(*arguments: str, **changes: str) -> Done:
    return start(*NUMAPIN, "exec", *arguments, **changes)


def become(*arguments: str, **changes: str) -> dict[str, str]:
    """Return the output of the script that `numapin exec` became."""
    done = enter(*arguments, **changes)
    assert done.status == 0, done.err
    return done.json_lines()[0]


@needs_two_cpus
def test_its_own_part(dump: tuple[str, ...]) -> None:
    """The launcher's process becomes the command: rank 1 of 2 has the second CPU, and two variables more.

    CUDA_VISIBLE_DEVICES is unchanged. How other launchers number a task is recorded in tests/unit/tasks. The memory
    policy is set before the command starts; `local` is MPOL_LOCAL, or MPOL_PREFERRED on older kernels.
    """
    for bind, memory, modes in (("exclusive", "interleave=0", ["3"]), ("none", "local", ["4", "1"])):
        command = ("sh", "-c", 'echo $$; exec "$@"', "sh", *NUMAPIN, "exec", "--bind", bind, "--memory", memory)
        done = start(*command, *dump, CUDA_VISIBLE_DEVICES="3,1", **TASK)
        (found,) = done.json_lines()
        assert done.out.splitlines()[0] == found["pid"]
        assert found["mode"] in modes
        if bind == "exclusive":
            assert (found["cpus"], found["CUDA_VISIBLE_DEVICES"]) == (str(CPUS[1]), "3,1")
            binding = json.loads(found["NUMAPIN_BINDING"])
            assert (binding["local_rank"], binding["cpus"]) == (1, found["cpus"])
            assert found["OMP_NUM_THREADS"] == str(binding["num_threads"])
            assert found.keys() - environment(**TASK).keys() - {"LC_CTYPE", "PWD", "OLDPWD"} == {
                *("NUMAPIN_BINDING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
                *({"RANK"} - environment().keys()),
                *("cpus", "mode", "pid", "files"),
            }


def test_the_nic_of_a_plan(dump: tuple[str, ...], tmp_path: Path) -> None:
    """A plan made with --nic-env sets the rank's variables; those that the user has set stay, with a warning."""
    file = tmp_path / "plan.json"
    file.write_text(forked("plan", "--machine", "example:dgx-a100", "--nic-env", "ucx,nvshmem", "--json").out)
    options = ("--plan", str(file), "--local-size", "8", "--local-rank")
    found = become(*options, "4", *dump)
    assert (found["UCX_NET_DEVICES"], found["NVSHMEM_HCA_LIST"]) == ("mlx5_6:1", "mlx5_6:1")
    assert found["NUMAPIN_NIC_ENV"] == "UCX_NET_DEVICES:NVSHMEM_ENABLE_NIC_PE_MAPPING:NVSHMEM_HCA_LIST"
    done = enter(*options, "0", *dump, UCX_NET_DEVICES="mlx5_5:1")
    found = done.json_lines()[0]
    assert (found["UCX_NET_DEVICES"], found["NVSHMEM_HCA_LIST"]) == ("mlx5_5:1", "mlx5_0:1")
    assert "warning: UCX_NET_DEVICES=mlx5_5:1 is set and stays: --nic-env does not change it for rank 0" in done.err


def test_pipes_end_as_they_do() -> None:
    """The command does not inherit that Python ignores SIGPIPE."""
    done = start("sh", "-c", f"{' '.join(NUMAPIN)} exec -- yes | head -n 1", **TASK)
    assert (done.status, done.out, done.err) == (0, "y\n", "")


# --- a plan that was made in advance ----------------------------------------------------------------------------------


@needs_two_cpus
def test_its_part_of_a_plan(dump: tuple[str, ...], plan: str, tmp_path: Path) -> None:
    """The plan comes from the named file, or from plan.json in the run directory; binding options override that."""
    assert become("--plan", plan, *dump, **TASK)["cpus"] == str(CPUS[1])
    assert become(*dump, NUMAPIN_RUN_DIR=str(tmp_path), **TASK)["cpus"] == str(CPUS[1])
    made = become("--bind", "node", *dump, NUMAPIN_RUN_DIR=str(tmp_path), **TASK)
    assert made["cpus"] == cpu_set.render(CPUS)


@pytest.mark.parametrize("program", [NUMAPIN, CLICK])
def test_a_run_directory_with_what_is_no_plan(tmp_path: Path, program: tuple[str, ...]) -> None:
    """A pipe or a folder in place of the plan is an error at once; a run directory that is a file has no plan."""
    for make in (os.mkfifo, os.mkdir):
        make(tmp_path / "plan.json")
        done = start(*program, "exec", "true", NUMAPIN_RUN_DIR=str(tmp_path), **TASK)
        assert (done.status, f"{tmp_path}/plan.json cannot be read" in done.err) == (3, True), done.err
        (tmp_path / "plan.json").rename(tmp_path / make.__name__)
    assert start(*program, "exec", "true", NUMAPIN_RUN_DIR=__file__, **TASK).status == 0


@needs_two_cpus
def test_what_the_manager_gave_is_kept_to(dump: tuple[str, ...], plan: str) -> None:
    """Planned CPUs that the task may not use are left out with one warning; --strict refuses them."""
    command = ("taskset", "-c", str(CPUS[0]), *NUMAPIN, "exec", "--plan", plan)
    done = start(*command, *dump, **TASK)
    assert done.json_lines()[0]["cpus"] == str(CPUS[0])
    assert done.err.count(f"planned CPUs {CPUS[1]} are not among those that this task was given") == 1
    done = start(*command, "--strict", *dump, **TASK)
    assert (done.status, done.out) == (5, "")


def test_without_reading_the_machine(plan: str) -> None:
    """With a plan, neither click nor rich nor torch nor pynvml nor a reader of the machine is imported."""
    heavy = ("click", "rich", "torch", "pynvml", "numapin.topology")
    code = (
        "import os, sys; from numapin.cli.entry import main\n"
        f"os.execvp = lambda *_: os._exit(any(name in sys.modules for name in {heavy}))\n"
        f"sys.argv = ['numapin', 'exec', '--plan', {plan!r}, 'true']; main()"
    )
    done = start(sys.executable, "-c", code, **TASK)
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    ("line", "binding", "status", "why"),
    [
        ("--plan {plan} -- no-such-program", "", 127, "no-such-program: command not found"),
        ("--plan {plan} -- /", "", 126, "/: Permission denied"),
        ("--plan {plan} -- ''", "", 2, "the command is empty"),  # of a variable that is unset
        ("-- ''", "", 2, "the command is empty"),
        ("--plan {plan} --bind node true", "", 2, "already decides --bind"),
        ("--plan {plan} --no-smt true", "", 2, "already decides --no-smt"),
        ("true", "x", 3, "unset NUMAPIN_BINDING"),
        ("true", '{"local_rank": 1}', 3, "unset NUMAPIN_BINDING"),
    ],
)
def test_what_cannot_be(plan: str, line: str, binding: str, status: int, why: str) -> None:
    """A command that cannot be started has the status that a shell gives it; options and variables may contradict."""
    given = {"NUMAPIN_BINDING": binding} if binding else {}
    done = enter(*shlex.split(line.format(plan=plan)), **TASK, **given)
    assert (done.status, why in done.err) == (status, True), done.err
    assert ("NUMAPIN_BINDING: " in done.err) == bool(binding)


def test_a_policy_that_is_refused(dump: tuple[str, ...]) -> None:
    """Without --strict a rank reports a refused policy once, records it and runs; with --strict it does not run."""
    command = (*REFUSE_POLICY, *NUMAPIN, "exec", "--memory", "interleave=0")
    done = start(*command, *dump, **TASK)
    if "cannot install" in done.err:
        pytest.skip(done.err)
    assert (done.status, done.err.count("was refused")) == (0, 1), done.err
    binding = json.loads(done.json_lines()[0]["NUMAPIN_BINDING"])
    assert (binding["exact"], "was refused" in binding["reason"]) == (False, True)
    done = start(*command, "--strict", *dump, **TASK)
    assert (done.status, done.out) == (5, ""), done.err
    assert "--strict: rank 1 cannot be bound exactly: " in done.err
    assert "see every decision with: numapin exec --verbose; " in done.err


# --- launchers that start ranks themselves ----------------------------------------------------------------------------


@needs_two_cpus
def test_launchers_of_several_ranks(dump: tuple[str, ...]) -> None:
    """Each rank of `torchrun --no-python numapin exec` has its own CPU.

    A rank of `numapin run` keeps its binding, even if LOCAL_RANK is 0 in all ranks.
    """
    ranks = ("--nproc-per-node", "2", "--no-python")
    exclusive = ("--bind", "exclusive")
    below = torchrun("--standalone", "--local-addr", "127.0.0.1", *ranks, *NUMAPIN, "exec", *exclusive, *dump)
    ours = run_numapin("run", "--quiet", *exclusive, "--virtual-local-rank", *ranks, *NUMAPIN, "exec", *dump)
    for done in (below, ours):
        assert [rank["cpus"] for rank in done.json_lines()] == [str(cpu) for cpu in CPUS[:2]], done.err


@needs_two_cpus
def test_deepspeed(dump: tuple[str, ...]) -> None:
    """DeepSpeed's variables are recognized, and the --local_rank=N that it adds after the program is removed."""
    variables = {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}
    done = start(*CLICK, "exec", "--bind", "exclusive", *dump, **variables)
    assert [rank["cpus"] for rank in done.json_lines()] == [str(CPUS[1])], done.err


@needs_two_cpus
def test_what_another_rank_was_given(dump: tuple[str, ...], plan: str) -> None:
    """A binding inherited from another rank is ignored: a plan is made, and --verbose says why."""
    binding = json.dumps(json.loads(Path(plan).read_text())["ranks"][0])
    for variables in (TASK, TASK | TORCHS):
        done = enter("--verbose", *dump, **variables, NUMAPIN_BINDING=binding)
        assert done.json_lines()[0]["cpus"] == cpu_set.render(CPUS)
        assert "rank 1: NUMAPIN_BINDING was set and is ignored" in done.err


def launcher(folder: Path, line: str, *masked: str, **variables: str) -> tuple[str, ...]:
    """Return a launcher that gives a task these variables; the task is a shell that reads the line."""
    folder.mkdir()
    code = f"import os, subprocess, sys\nvariables = os.environ | {variables!r}\n"
    code += f"sys.exit(subprocess.run({[*masked, 'sh', '-c', f'{line}; exit $?']!r}, env=variables).returncode)"
    return (sys.executable, script(folder, code, "launcher.py"))


def line_of(dump: tuple[str, ...], *options: str) -> str:
    return shlex.join((*NUMAPIN, "exec", "--verbose", "--bind", "exclusive", *options, *dump))


@needs_two_cpus
@pytest.mark.parametrize(
    ("variables", "wrapper", "options"),
    [
        (MPI, "", ()),
        (STEP, "export LOCAL_RANK=1 LOCAL_WORLD_SIZE=2; ", ()),
        (STEP, "", ("--local-rank", "1", "--local-size", "2")),
    ],
)
def test_a_manager_that_binds(
    tmp_path: Path, dump: tuple[str, ...], wrapper: str, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    """CPUs that belong to this task alone are not divided again, although it is one of two.

    A shell between the task and its launcher is part of the task, even if it sets a rank.
    """
    line = wrapper + line_of(dump, *options)
    done = start(*launcher(tmp_path / "manager", line, "taskset", "-c", str(LAST), **variables))
    assert done.status == 0, done.err
    assert done.json_lines()[0]["cpus"] == str(LAST)
    assert f"for this task alone: CPUs {LAST} are its own" in done.err


@needs_two_cpus
def test_a_launcher_that_a_launcher_started(tmp_path: Path, dump: tuple[str, ...]) -> None:
    """CPUs that srun gave to one task are shared by the ranks that this task starts, although srun has more."""
    ranks = shlex.join(launcher(tmp_path / "inner", line_of(dump), **TASK))
    alone = {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    done = start(*launcher(tmp_path / "outer", ranks, "taskset", "-c", str(LAST), **alone))
    assert (done.status, "too few exclusive cores for 2 ranks" in done.err) == (4, True), done.err


# --- GPUs: which one a task gets is recorded in tests/unit/tasks ------------------------------------------------------


@pytest.fixture
def two_gpus(fake_nvml: FakeNvml, tmp_path: Path) -> dict[str, str]:
    """Give an environment in which NVML reports two GPUs, as task 0 of 2."""
    recorded = (Path(__file__).parents[1] / "nvml" / "h200-x2-vm.nvml").read_text()
    return fake_nvml.environment(tmp_path, recorded) | TASK | {"LOCAL_RANK": "0"}


def gpu_of(found: dict[str, str]) -> dict[str, Any]:
    gpu: dict[str, Any] = json.loads(found["NUMAPIN_BINDING"])["gpu"]
    return gpu


def test_gpus(dump: tuple[str, ...], two_gpus: dict[str, str]) -> None:
    """Rank n uses visible GPU n; --gpus selects others, and only --gpus exports CUDA_VISIBLE_DEVICES, as UUIDs."""
    found = become(*dump, **two_gpus | {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert (gpu_of(found)["index"], found["CUDA_VISIBLE_DEVICES"]) == (1, "1,0")
    found = become("--gpus", "1", *dump, **two_gpus)
    assert (gpu_of(found)["index"], gpu_of(found)["uuid"]) == (1, found["CUDA_VISIBLE_DEVICES"])


def test_the_gpu_of_a_plan(
    dump: tuple[str, ...], two_gpus: dict[str, str], fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    """A task that sees one GPU uses it, whatever its rank; NVML looks an index up, and a last comma is nothing.

    If CUDA_VISIBLE_DEVICES hides all GPUs, the rank's number counts, without a message and without NVML.
    """
    path = tmp_path / "two.json"
    path.write_text(start(*NUMAPIN, "plan", "--json", **two_gpus).out)
    uuid = json.loads(path.read_text())["ranks"][1]["gpu"]["uuid"]
    for options, visible in (((), uuid), (("--plan", str(path)), "1"), (("--plan", str(path)), "1,")):
        assert gpu_of(become(*options, *dump, **two_gpus | {"CUDA_VISIBLE_DEVICES": visible}))["uuid"] == uuid
    broken = fake_nvml.environment(tmp_path, "fail init 18\n") | TASK | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    done = enter("--strict", "--plan", str(path), *dump, **broken)
    assert (done.status, done.err) == (0, "")
    assert gpu_of(done.json_lines()[0])["index"] == 1
