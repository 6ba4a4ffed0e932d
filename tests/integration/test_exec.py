"""`numapin exec` as launchers start it, and what the kernel reports of the command that it becomes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.launching import NUMAPIN, REFUSE_POLICY, Done, call, environment, forked, script, torchrun
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
DUMP = """
import ctypes, json, os
status = open("/proc/self/status").read()
cpus = next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
mode = ctypes.c_int(-1)
ctypes.CDLL("libnuma.so.1").get_mempolicy(ctypes.byref(mode), None, 0, None, 0)
environ = dict(os.environ) | {"RANK": os.environ.get("RANK", "0"), "cpus": cpus, "mode": str(mode.value)}
os.write(1, (json.dumps(environ | {"pid": str(os.getpid())}) + "\\n").encode())  # in one piece: ranks share the pipe
"""


@pytest.fixture
def dump(tmp_path: Path) -> str:
    """Give a script that prints its environment and its binding as the kernel reports it."""
    return script(tmp_path, DUMP)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """Give a plan of two ranks with one CPU each."""
    path = tmp_path / "plan.json"
    path.write_text(forked("plan", "--nproc-per-node", "2", "--bind", "exclusive", "--json").out)
    return str(path)


def start(*command: str, **changes: str) -> Done:
    """Run a command and wait for its end."""
    return call(*command, cwd=None, **changes)


def enter(*arguments: str, **changes: str) -> Done:
    """Run `numapin exec` as the installed program."""
    return start(*NUMAPIN, "exec", *arguments, **changes)


def become(path: str, *arguments: str, **changes: str) -> dict[str, str]:
    """Return the output of the script that `numapin exec` became."""
    done = enter(*arguments, "--", sys.executable, path, **changes)
    assert done.status == 0, done.err
    return done.json_lines()[0]


class TestBinding:
    """The environment, CPUs and policy with which the command starts."""

    @needs_two_cpus
    def test_its_own_part(self, dump: str) -> None:
        """Rank 1 of 2 is bound to the second CPU; how other launchers number it is recorded in tests/unit/tasks."""
        found = become(dump, "--bind", "exclusive", **TASK)
        assert found["cpus"] == str(CPUS[1])
        binding = json.loads(found["NUMAPIN_BINDING"])
        assert (binding["local_rank"], binding["cpus"]) == (1, found["cpus"])
        assert found["OMP_NUM_THREADS"] == str(binding["num_threads"])

    def test_memory_policy(self, dump: str) -> None:
        """The policy is set before the command starts; `local` is MPOL_LOCAL, or MPOL_PREFERRED on older kernels."""
        assert become(dump, "--memory", "local", **TASK)["mode"] in ("4", "1")
        assert become(dump, "--memory", "interleave=0", **TASK)["mode"] == "3"

    def test_it_is_the_same_process(self, dump: str) -> None:
        """The command runs in the process that the launcher started, with and without a plan."""
        for options in ((), ("--bind", "none")):
            process = subprocess.Popen(
                [*NUMAPIN, "exec", *options, "--", sys.executable, dump],
                stdout=subprocess.PIPE,
                env=environment(**TASK),
            )
            out, _ = process.communicate(timeout=60)
            assert json.loads(out)["pid"] == str(process.pid)

    def test_nothing_else_is_exported(self, dump: str) -> None:
        """The command's environment has two more variables, and CUDA_VISIBLE_DEVICES is unchanged."""
        found = become(dump, CUDA_VISIBLE_DEVICES="3,1", **TASK)
        assert found["CUDA_VISIBLE_DEVICES"] == "3,1"
        assert found.keys() - environment(**TASK).keys() - {"LC_CTYPE"} == {
            *("NUMAPIN_BINDING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
            *({"RANK"} - environment().keys()),
            *("cpus", "mode", "pid"),
        }

    def test_the_nic_of_a_plan(self, dump: str, tmp_path: Path) -> None:
        """A plan made with --nic-env sets the rank's variables; those that the user has set stay, with a warning."""
        plan = json.loads(forked("plan", "--machine", "example:dgx-a100", "--nic-env", "ucx,nvshmem", "--json").out)
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan))
        options = ("--plan", str(file), "--local-size", "8", "--local-rank")
        found = become(dump, *options, "4")
        assert (found["UCX_NET_DEVICES"], found["NVSHMEM_HCA_LIST"]) == ("mlx5_6:1", "mlx5_6:1")
        assert found["NUMAPIN_NIC_ENV"] == "UCX_NET_DEVICES:NVSHMEM_ENABLE_NIC_PE_MAPPING:NVSHMEM_HCA_LIST"
        done = enter(*options, "0", "--", sys.executable, dump, UCX_NET_DEVICES="mlx5_5:1")
        found = done.json_lines()[0]
        assert (found["UCX_NET_DEVICES"], found["NVSHMEM_HCA_LIST"]) == ("mlx5_5:1", "mlx5_0:1")
        assert "warning: UCX_NET_DEVICES=mlx5_5:1 is set and stays: --nic-env does not change it for rank 0" in done.err

    def test_pipes_end_as_they_do(self) -> None:
        """The command does not inherit that Python ignores SIGPIPE."""
        done = start("sh", "-c", f"{' '.join(NUMAPIN)} exec -- yes | head -n 1", **TASK)
        assert (done.status, done.out, done.err) == (0, "y\n", "")


class TestPlan:
    """A plan that was made in advance."""

    @needs_two_cpus
    def test_its_part_of_it(self, dump: str, plan: str, tmp_path: Path) -> None:
        """The plan comes from the named file, or from plan.json in the run directory."""
        assert become(dump, "--plan", plan, **TASK)["cpus"] == str(CPUS[1])
        assert become(dump, NUMAPIN_RUN_DIR=str(tmp_path), **TASK)["cpus"] == str(CPUS[1])

    @pytest.mark.parametrize("program", [NUMAPIN, CLICK])
    def test_a_run_directory_with_what_is_no_plan(self, tmp_path: Path, program: tuple[str, ...]) -> None:
        """A pipe or a folder in place of the plan is an error at once; a run directory that is a file has no plan."""
        for make in (os.mkfifo, os.mkdir):
            make(tmp_path / "plan.json")
            done = start(*program, "exec", "true", NUMAPIN_RUN_DIR=str(tmp_path), **TASK)
            assert (done.status, f"{tmp_path}/plan.json cannot be read" in done.err) == (3, True), done.err
            (tmp_path / "plan.json").rename(tmp_path / make.__name__)
        assert start(*program, "exec", "true", NUMAPIN_RUN_DIR=__file__, **TASK).status == 0

    @needs_two_cpus
    def test_binding_options_make_a_new_one(self, dump: str, tmp_path: Path, plan: str) -> None:
        """Binding options override the plan of the run directory, and conflict with --plan."""
        assert become(dump, "--bind", "node", NUMAPIN_RUN_DIR=str(tmp_path), **TASK)["cpus"] == cpu_set.render(CPUS)
        done = enter("--plan", plan, "--bind", "node", "true", **TASK)
        assert (done.status, "already decides --bind" in done.err) == (2, True), done.err
        done = enter("--plan", plan, "--no-smt", "true", **TASK)
        assert (done.status, "already decides --no-smt" in done.err) == (2, True), done.err

    @needs_two_cpus
    def test_what_the_manager_gave_is_kept_to(self, dump: str, plan: str) -> None:
        """Planned CPUs that the task may not use are left out with one warning; --strict refuses them."""
        taskset = ("taskset", "-c", str(CPUS[0]))
        done = start(*taskset, *NUMAPIN, "exec", "--plan", plan, "--", sys.executable, dump, **TASK)
        assert done.json_lines()[0]["cpus"] == str(CPUS[0])
        assert done.err.count(f"planned CPUs {CPUS[1]} are not among those that this task was given") == 1
        done = start(*taskset, *NUMAPIN, "exec", "--plan", plan, "--strict", "--", sys.executable, dump, **TASK)
        assert (done.status, done.out) == (5, "")

    def test_without_reading_the_machine(self, plan: str) -> None:
        """With a plan, neither click nor rich nor torch nor pynvml nor a reader of the machine is imported."""
        heavy = ("click", "rich", "torch", "pynvml", "numapin.topology")
        code = (
            "import os, sys; from numapin.cli.entry import main\n"
            f"os.execvp = lambda *_: os._exit(any(name in sys.modules for name in {heavy}))\n"
            f"sys.argv = ['numapin', 'exec', '--plan', {plan!r}, 'true']; main()"
        )
        done = start(sys.executable, "-c", code, **TASK)
        assert done.status == 0, done.err


class TestLaunchers:
    """Launchers that start ranks themselves."""

    def _ranks(self, *command: str, **changes: str) -> list[dict[str, Any]]:
        done = start(*command, **changes)
        assert done.status == 0, done.err
        return done.json_lines()

    @needs_two_cpus
    def test_torchrun(self, dump: str) -> None:
        """`torchrun --no-python numapin exec` gives each rank its own CPU."""
        run = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "--no-python")
        done = torchrun(*run, *NUMAPIN, "exec", "--bind", "exclusive", "--", sys.executable, dump)
        assert [rank["cpus"] for rank in done.json_lines()] == [str(cpu) for cpu in CPUS[:2]], done.err

    @needs_two_cpus
    def test_deepspeed(self, dump: str) -> None:
        """DeepSpeed's variables are recognized, and the --local_rank=N that it adds after the program is removed."""
        variables = {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1"}
        command = ("--local_rank=1", "exec", "--bind", "exclusive", "--", sys.executable, dump)
        (rank,) = self._ranks(*NUMAPIN, *command, **variables)
        assert rank["cpus"] == str(CPUS[1])

    @needs_two_cpus
    def test_numapin_run(self, dump: str) -> None:
        """A rank of `numapin run` keeps its binding, even if LOCAL_RANK is 0 in all ranks."""
        run = (*NUMAPIN, "run", "--quiet", "--nproc-per-node", "2", "--bind", "exclusive", "--no-python")
        ranks = self._ranks(*run, "--virtual-local-rank", *NUMAPIN, "exec", "--", sys.executable, dump)
        assert [rank["cpus"] for rank in ranks] == [str(cpu) for cpu in CPUS[:2]]

    @needs_two_cpus
    def test_what_another_rank_was_given(self, dump: str, plan: str) -> None:
        """A binding inherited from another rank is ignored: a plan is made, and --verbose says why."""
        binding = json.dumps(json.loads(Path(plan).read_text())["ranks"][0])
        line = (*NUMAPIN, "exec", "--verbose", "--", sys.executable, dump)
        for variables in (TASK, TASK | TORCHS):
            done = start(*line, **variables, NUMAPIN_BINDING=binding)
            assert done.json_lines()[0]["cpus"] == cpu_set.render(CPUS)
            assert "rank 1: NUMAPIN_BINDING was set and is ignored" in done.err

    @pytest.mark.parametrize("binding", ["x", '{"local_rank": 1}'])
    def test_a_binding_that_is_none(self, binding: str) -> None:
        """An invalid binding is an error that names the variable."""
        done = enter("true", **TASK, NUMAPIN_BINDING=binding)
        assert (done.status, "NUMAPIN_BINDING: " in done.err, "unset NUMAPIN_BINDING" in done.err) == (3, True, True)

    def _launcher(self, folder: Path, line: str, *masked: str, **variables: str) -> tuple[str, ...]:
        """Return a launcher that gives a task these variables; the task is a shell that reads the line."""
        command = [*masked, "sh", "-c", f"{line}; exit $?"]
        code = "import os, subprocess, sys\n"
        code += f"sys.exit(subprocess.run({command!r}, env=os.environ | {variables!r}).returncode)"
        return (sys.executable, script(folder, code, "launcher.py"))

    def _line(self, folder: Path, *options: str) -> str:
        enter = (*NUMAPIN, "exec", "--verbose", "--bind", "exclusive", *options)
        return shlex.join((*enter, "--", sys.executable, f"{folder}/train.py"))

    @needs_two_cpus
    @pytest.mark.usefixtures("dump")
    @pytest.mark.parametrize(
        ("variables", "wrapper", "options"),
        [
            (MPI, "", ()),
            (STEP, "export LOCAL_RANK=1 LOCAL_WORLD_SIZE=2; ", ()),
            (STEP, "", ("--local-rank", "1", "--local-size", "2")),
        ],
    )
    def test_a_manager_that_binds(
        self, tmp_path: Path, wrapper: str, options: tuple[str, ...], variables: dict[str, str]
    ) -> None:
        """CPUs that belong to this task alone are not divided again, although it is one of two.

        A shell between the task and its launcher is part of the task, even if it sets a rank.
        """
        line = wrapper + self._line(tmp_path, *options)
        done = start(*self._launcher(tmp_path, line, "taskset", "-c", str(LAST), **variables))
        assert done.status == 0, done.err
        assert done.json_lines()[0]["cpus"] == str(LAST)
        assert f"for this task alone: CPUs {LAST} are its own" in done.err

    @needs_two_cpus
    @pytest.mark.usefixtures("dump")
    def test_a_launcher_that_a_launcher_started(self, tmp_path: Path) -> None:
        """CPUs that srun gave to one task are shared by the ranks that this task starts, although srun has more."""
        ranks = self._launcher(tmp_path, self._line(tmp_path), **TASK)
        (tmp_path / "outer").mkdir()
        alone = {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
        done = start(*self._launcher(tmp_path / "outer", shlex.join(ranks), "taskset", "-c", str(LAST), **alone))
        assert (done.status, "too few exclusive cores for 2 ranks" in done.err) == (4, True), done.err


class TestGpus:
    """Tasks that see all GPUs, or one."""

    @pytest.fixture
    def two_gpus(self, fake_nvml: FakeNvml, tmp_path: Path) -> dict[str, str]:
        """Give an environment in which NVML reports two GPUs, as task 0 of 2."""
        recorded = (Path(__file__).parents[1] / "nvml" / "h200-x2-vm.nvml").read_text()
        return fake_nvml.environment(tmp_path, recorded) | TASK | {"LOCAL_RANK": "0"}

    def _gpu(self, path: str, *options: str, **changes: str) -> dict[str, Any]:
        gpu: dict[str, Any] = json.loads(become(path, *options, **changes)["NUMAPIN_BINDING"])["gpu"]
        return gpu

    def test_by_rank(self, dump: str, two_gpus: dict[str, str]) -> None:
        """Rank n uses visible GPU n; --gpus selects others, and only --gpus exports CUDA_VISIBLE_DEVICES, as UUIDs."""
        assert self._gpu(dump, **two_gpus)["index"] == 0
        assert self._gpu(dump, **two_gpus | {"CUDA_VISIBLE_DEVICES": "1,0"})["index"] == 1
        found = become(dump, "--gpus", "1", **two_gpus)
        gpu = json.loads(found["NUMAPIN_BINDING"])["gpu"]
        assert (gpu["index"], gpu["uuid"]) == (1, found["CUDA_VISIBLE_DEVICES"])

    def test_the_one_that_it_sees(self, dump: str, two_gpus: dict[str, str], tmp_path: Path) -> None:
        """A task that sees one GPU uses it, whatever its rank; with a plan, an index is looked up with NVML."""
        path = tmp_path / "two.json"
        path.write_text(start(*NUMAPIN, "plan", "--json", **two_gpus).out)
        uuid = json.loads(path.read_text())["ranks"][1]["gpu"]["uuid"]
        for options, visible in (((), uuid), (("--plan", str(path)), "1")):
            assert self._gpu(dump, *options, **two_gpus | {"CUDA_VISIBLE_DEVICES": visible})["uuid"] == uuid

    def test_a_task_that_sees_no_gpu(
        self, dump: str, two_gpus: dict[str, str], fake_nvml: FakeNvml, tmp_path: Path
    ) -> None:
        """If CUDA_VISIBLE_DEVICES hides all GPUs, the rank's number counts, without a message and without NVML."""
        path = tmp_path / "two.json"
        path.write_text(start(*NUMAPIN, "plan", "--json", **two_gpus).out)
        broken = fake_nvml.environment(tmp_path, "fail init 18\n") | TASK | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}
        done = enter("--strict", "--plan", str(path), "--", sys.executable, dump, **broken)
        assert (done.status, done.err) == (0, "")
        assert json.loads(done.json_lines()[0]["NUMAPIN_BINDING"])["gpu"]["index"] == 1


class TestErrors:
    """Errors have a message, and a status for each kind."""

    @pytest.mark.parametrize(
        ("command", "status", "why"),
        [
            ("no-such-program", 127, "no-such-program: command not found"),
            ("/", 126, "/: Permission denied"),
        ],
    )
    def test_commands_that_cannot_be(self, plan: str, command: str, status: int, why: str) -> None:
        """A command that cannot be started has the status that a shell gives it."""
        done = enter("--plan", plan, "--", command, **TASK)
        assert (done.status, why in done.err) == (status, True), done.err

    def test_a_policy_that_is_refused(self, dump: str) -> None:
        """Without --strict a rank reports a refused policy once, records it and runs; with --strict it does not run."""
        command = (*NUMAPIN, "exec", "--memory", "interleave=0")
        done = start(*REFUSE_POLICY, *command, "--", sys.executable, dump, **TASK)
        if "cannot install" in done.err:
            pytest.skip(done.err)
        assert (done.status, done.err.count("was refused")) == (0, 1), done.err
        binding = json.loads(done.json_lines()[0]["NUMAPIN_BINDING"])
        assert (binding["exact"], "was refused" in binding["reason"]) == (False, True)
        done = start(*REFUSE_POLICY, *command, "--strict", "--", sys.executable, "-c", "print('ran')", **TASK)
        assert (done.status, done.out) == (5, ""), done.err
        assert "--strict: rank 1 cannot be bound exactly: " in done.err
        assert "see every decision with: numapin exec --verbose; " in done.err


class TestVerbose:
    """The output of --verbose."""

    def test_all_that_was_found(self, plan: str) -> None:
        """It shows the task and the source of its rank, the plan, the reason and the result; stdout stays empty."""
        done = enter("--verbose", "--plan", plan, "true", **TASK, SLURM_LOCALID="0")
        assert done.out == ""
        for text in (
            "rank 1: this is rank 1 of 2 on this host (LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)",
            "SLURM_LOCALID=0 is ignored because LOCAL_RANK is set",
            f"the plan: {plan}",
            "the reason: no GPU: rank 1 of 2",
            f"bound to: CPUs {CPUS[1 % len(CPUS)]}, memory",
            "OMP_NUM_THREADS=1",
        ):
            assert text in done.err
        assert enter("--plan", plan, "true", **TASK).err == ""
