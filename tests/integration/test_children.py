"""`numapin exec --children`: processes that a command starts are bound once they have a GPU.

The GPUs are the fake NVML's; torch is a stand-in where it does not matter. Threads, policies and pages: tests/vm.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.cuda import fake as fake_driver
from tests.integration.launching import NUMAPIN, TORCH_QUICKLY, Done, call, environment, script
from tests.needs import needs_accelerate, needs_two_cpus
from tests.nvml.fake import FakeGpu, render
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    from tests.nvml.fake import FakeNvml

STAND_IN: Final = Path(__file__).resolve().parents[1] / "children" / "stand_in"
CPUS: Final = sorted(os.sched_getaffinity(0))
GPUS: Final = [
    FakeGpu(
        uuid=f"GPU-0000000{i}-0000-0000-0000-000000000000", pci=f"00000000:{0x41 + i:02x}:00.0", cpus=frozenset(CPUS)
    )
    for i in range(2)
]
LIMIT_S: Final = 60

# Prints a line in one piece: processes share the pipe.
SHOW: Final = """
import json, os, sys
def show(name, **more):
    tasks = sorted({tuple(os.sched_getaffinity(int(tid))) for tid in os.listdir("/proc/self/task")})
    found = {"name": name, "RANK": "0", "cpus": tasks, "pid": os.getpid(), "bound": "NUMAPIN_BINDING" in os.environ}
    os.write(1, (json.dumps({**found, **more}) + "\\n").encode())
"""


@pytest.fixture
def gpus(fake_nvml: FakeNvml, tmp_path: Path) -> dict[str, Any]:
    """Return an environment with two GPUs, and with the stand-in for torch."""
    environ = fake_nvml.environment(tmp_path, render(GPUS))
    nvml = {name: environ[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_DATA")}
    return {**nvml, "PYTHONPATH": str(STAND_IN), "TMPDIR": str(tmp_path)}


def start(*command: str, options: tuple[str, ...] = (), cwd: Path | None = None, **environ: str) -> Done:
    """Run a command under `numapin exec --children --bind exclusive`."""
    return call(*NUMAPIN, "exec", "--children", "--bind", "exclusive", *options, "--", *command, cwd=cwd, **environ)


def python(folder: Path, text: str, *arguments: str, options: tuple[str, ...] = (), **environ: Any) -> Done:
    """Run a script so; it may call `show`."""
    return start(sys.executable, script(folder, SHOW + text, "program.py"), *arguments, options=options, **environ)


def shown(done: Done) -> dict[str, dict[str, Any]]:
    """Return what processes have shown, by name; the command must have succeeded."""
    assert done.status == 0, done.err
    return {line["name"]: line for line in map(json.loads, done.out.splitlines())}


def own_cpu(number: int) -> list[list[int]]:
    return [[CPUS[number]]]


WORKERS: Final = """
import multiprocessing as mp, threading
def work(way, rank):
    end = threading.Event()
    threading.Thread(target=end.wait).start()  # before torch, and before the device is known
    import torch
    show(f"{way}-{rank}-before")
    torch.cuda.set_device(f"cuda:{rank}")
    show(f"{way}-{rank}")
    helper = mp.get_context("fork").Process(target=show, args=(f"{way}-{rank}-helper",))
    helper.start()
    helper.join()
    end.set()
if __name__ == "__main__":
    for way in ("spawn", "fork", "forkserver"):
        workers = [mp.get_context(way).Process(target=work, args=(way, rank)) for rank in range(2)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
    show("driver")
"""


@needs_two_cpus
def test_multiprocessing(gpus: dict[str, Any], tmp_path: Path) -> None:
    """Workers of each start method are bound at set_device, and so are their helpers, but not the driver."""
    done = python(tmp_path, WORKERS, **gpus)
    found = shown(done)
    for way in ("spawn", "fork", "forkserver"):
        for rank in range(2):
            assert found[f"{way}-{rank}-before"]["cpus"] == [CPUS]
            assert found[f"{way}-{rank}"]["cpus"] == found[f"{way}-{rank}-helper"]["cpus"] == own_cpu(rank)
    assert (found["driver"]["cpus"], found["driver"]["bound"]) == ([CPUS], False)
    lines = [line for line in done.err.splitlines() if "MiB were allocated before" in line]
    assert len(lines) == 6, done.err
    assert f"is bound to GPU 1 (torch.cuda.set_device(1)): CPUs {CPUS[1]}, memory none" in done.err


@needs_two_cpus
def test_real_torch(gpus: dict[str, Any], tmp_path: Path) -> None:
    """With the installed torch, whose CUDA call does nothing here, a worker of its spawn is bound."""
    text = """
torch._C._cuda_setDevice = lambda device: None
def work(_):
    torch.set_num_threads(2)
    torch.ones(512, 512).mm(torch.ones(512, 512))  # its threads are there before the device is set
    torch.cuda.set_device(1)
    show("worker", name_of_function=torch.cuda.set_device.__name__)
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=1)
    show("driver")
"""
    found = shown(python(tmp_path, TORCH_QUICKLY + text, **{**gpus, "PYTHONPATH": ""}))
    assert (found["worker"]["cpus"], found["worker"]["name_of_function"]) == (own_cpu(1), "set_device")
    assert found["driver"]["cpus"] == [CPUS]


@needs_two_cpus
def test_what_a_driver_with_both_gpus_starts(gpus: dict[str, Any], tmp_path: Path) -> None:
    """Its workers are bound to the GPU that they name; those bound before it, and their helpers, stay as they are.

    Changes of the list after set_device are for children only.
    """
    text = """
import multiprocessing as mp, subprocess, time, torch
HELPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]
def work(rank, name, ready=None, end=None):
    torch.cuda.set_device(rank)
    if ready is not None:
        helper = subprocess.Popen(HELPER, stdin=subprocess.PIPE)
        ready.set()
        end.wait()
        show(name + "-helper", helper=sorted(os.sched_getaffinity(helper.pid)))
        helper.communicate(b"")
    show(name)
if __name__ == "__main__":
    early = {}
    for name in sys.argv[1:]:
        ready, end = mp.Event(), mp.Event()
        early[name] = mp.get_context("fork").Process(target=work, args=(1, name, ready, end), name=name), end
        early[name][0].start()
        ready.wait()
    torch.cuda.set_device(0)
    for worker, end in early.values():
        end.set()
        worker.join()
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    torch.cuda.set_device(0)
    del os.environ["CUDA_VISIBLE_DEVICES"]
    show("one")
    torch.cuda.set_device(1)
    for way in ("spawn", "fork"):
        worker = mp.get_context(way).Process(target=work, args=(1, way))
        worker.start()
        worker.join()
"""
    found = shown(python(tmp_path, text, "early", **gpus))
    assert (found["early"]["cpus"], found["early-helper"]["helper"]) == (own_cpu(1), [CPUS[1]])
    assert found["one"]["cpus"] == own_cpu(0)
    assert (found["spawn"]["cpus"], found["fork"]["cpus"]) == (own_cpu(1), own_cpu(1))


@needs_two_cpus
@needs_accelerate
def test_accelerate(gpus: dict[str, Any], tmp_path: Path) -> None:
    """`accelerate launch` starts ranks with LOCAL_RANK: they are bound when they start, before torch."""
    text = "show(os.environ['LOCAL_RANK'], torch='torch' in sys.modules)"
    options = "--multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no"
    launch = (sys.executable, "-m", "accelerate.commands.launch", *options.split())
    found = shown(start(*launch, script(tmp_path, SHOW + text), **{**gpus, "PYTHONPATH": ""}))
    assert [found[rank]["cpus"] for rank in ("0", "1")] == [own_cpu(0), own_cpu(1)]
    assert not found["0"]["torch"]


@needs_two_cpus
class TestRules:
    """Which GPU counts."""

    def test_what_the_environment_says(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """One visible GPU, by index or UUID, and a local rank, bind at the start; what the command had does not."""
        text = """
import subprocess
if sys.argv[1:]:
    show(sys.argv[1], torch="torch" in sys.modules, threads=os.environ.get("OMP_NUM_THREADS"))
else:
    for name, value in (("CUDA_VISIBLE_DEVICES", "1"), ("CUDA_VISIBLE_DEVICES", "GPU-00000001"), ("LOCAL_RANK", "1"),
                        ("MPI_LOCALRANKID", "3"), ("SLURM_LOCALID", "1"), ("CUDA_VISIBLE_DEVICES", "")):
        environ = {**os.environ, name: value}
        subprocess.run([sys.executable, __file__, f"{name}={value}"], env=environ, check=True)
"""
        found = shown(python(tmp_path, text, SLURM_LOCALID="1", PALS_LOCAL_RANKID="1", **gpus))
        assert len(found) == 6
        for name, each in found.items():
            if name in ("SLURM_LOCALID=1", "CUDA_VISIBLE_DEVICES="):
                assert (each["cpus"], each["bound"]) == ([CPUS], False), name
            else:
                assert (each["cpus"], each["threads"]) == (own_cpu(1), "1"), name

    def test_only_device(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """A process that sees one device is bound when CUDA is initialized, without set_device."""
        done = python(tmp_path, "import torch\ntorch.cuda.init()\nshow('only')", CUDA_VISIBLE_DEVICES="1", **gpus)
        assert "(CUDA was initialized)" in done.err
        assert shown(done)["only"]["bound"]

    @pytest.mark.parametrize(
        ("before", "initialized", "active"),
        [
            ((), CPUS, "0"),
            (("env", "LOCAL_RANK=1"), CPUS[1:2], "3"),  # with a context on device 0 beside its own
        ],
        ids=["first context", "local rank"],
    )
    def test_without_set_device(
        self, gpus: dict[str, Any], tmp_path: Path, before: tuple[str, ...], initialized: list[int], active: str
    ) -> None:
        """A process that sees several devices is bound to the one of its local rank, or where its first context is."""
        text = """
import ctypes, threading, torch
torch.cuda.init()
show("initialized")
if "LOCAL_RANK" not in os.environ:
    ctypes.CDLL("libcuda.so.1").fake_cuda_set(b"active", 2)  # a context on device 1
[thread.join() for thread in threading.enumerate() if thread.name == "numapin-context"]
show("context")
"""
        driver = fake_driver.build(Path(__file__).resolve().parents[2] / ".cache" / "fake-cuda")
        gpus |= {"LD_LIBRARY_PATH": f"{driver.parent}:{gpus['LD_LIBRARY_PATH']}"}
        gpus |= {"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_ACTIVE": active}
        done = start(*before, sys.executable, script(tmp_path, SHOW + text), **gpus)
        found = shown(done)
        assert (found["initialized"]["cpus"], found["context"]["cpus"]) == ([initialized], own_cpu(1))
        assert ("(its first CUDA context)" in done.err, "GPU 0" in done.err) == (not before, False)


class TestProgramsGoOn:
    """What must not change for the program."""

    def test_path_and_modules_at_start(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """A Python without torch has the path, the modules and the sitecustomize that it would have without numapin."""
        text = """
import json, sys, os
ours = [name for name in sys.modules if name.partition(".")[0] in ("numapin", "typing", "ctypes", "json.decoder")]
module = sys.modules.get("sitecustomize")
print(sys.path[1:], [name for name in ours if name != "json.decoder"], getattr(module, "__file__", None))
"""
        (tmp_path / "own").mkdir()
        script(tmp_path / "own", "seen = True", "sitecustomize.py")
        program = script(tmp_path, text)
        for entries in (":", f"{tmp_path / 'own'}{os.pathsep}"):
            plain = call(sys.executable, program, cwd=tmp_path, PYTHONPATH=entries)
            done = start(sys.executable, program, cwd=tmp_path, **{**gpus, "PYTHONPATH": entries})
            assert (done.status, done.out) == (plain.status, plain.out) == (0, plain.out)

    def test_statuses(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """The exit status is the command's, a signal ends both, and 127 means that there is no such command."""
        assert start("sh", "-c", "exit 7", **gpus).status == 7
        assert start("sh", "-c", "kill -TERM $$", **gpus).status == -signal.SIGTERM
        missing = start("no-such-command", **gpus)
        assert missing.status == 127
        assert "no-such-command: command not found" in missing.err
        assert "no Python process" not in missing.err
        assert list(tmp_path.glob("numapin-*/*")) == []  # no run folder is left

    def test_signals(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """SIGTERM and SIGUSR1 reach the command; if numapin is killed, the command ends, too."""
        text = """
import signal, time
def on(number, frame):
    show(signal.Signals(number).name)
    if number == signal.SIGTERM: sys.exit(3)
signal.signal(signal.SIGTERM, on); signal.signal(signal.SIGUSR1, on)
show("ready")
while True: time.sleep(1)
"""
        command = [*NUMAPIN, "exec", "--children", "--", sys.executable, script(tmp_path, SHOW + text)]
        for last in (signal.SIGTERM, signal.SIGKILL):
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment(**gpus)) as run:
                assert run.stdout is not None
                ready = json.loads(run.stdout.readline())
                assert ready["name"] == "ready"
                run.send_signal(signal.SIGUSR1)
                assert json.loads(run.stdout.readline())["name"] == "SIGUSR1"
                run.send_signal(last)
                assert run.wait(LIMIT_S) == (3 if last == signal.SIGTERM else -last)
                assert wait_until(partial(gone, ready["pid"]), limit_s=LIMIT_S)

    def test_ranks_of_numapin_run_are_its_own(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """`numapin run` below the command binds its ranks as always, and they do not bind themselves again."""
        text = "show(os.environ['LOCAL_RANK'], children='NUMAPIN_CHILDREN' in os.environ)"
        run = (*NUMAPIN, "run", "--quiet", "--nproc-per-node", "2", "--bind", "exclusive")
        done = start(*run, script(tmp_path, SHOW + text), **{**gpus, "PYTHONPATH": ""})
        found = shown(done)
        assert [found[rank]["cpus"] for rank in ("0", "1")] == [own_cpu(0), own_cpu(1)]
        assert not any(each["children"] for each in found.values())

    def test_ranks_do_not_follow_a_driver(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """A process that takes a GPU leaves ranks of a `numapin run` that it started before where they are."""
        text = """
import subprocess, torch
hook = os.environ["PYTHONPATH"].partition(":")[0]  # without the stand-in for torch
run = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": hook})
ranks = [json.loads(run.stdout.readline())["pid"] for _ in range(2)]
torch.cuda.set_device(0)
show("driver", ranks=sorted([*os.sched_getaffinity(pid)] for pid in ranks))
run.terminate()
run.wait()
"""
        waiting = script(tmp_path, SHOW + "import signal\nshow('rank')\nsignal.pause()", "waiting.py")
        run = (*NUMAPIN, "run", "--quiet", "--nproc-per-node", "2", "--bind", "exclusive", waiting)
        driver = shown(python(tmp_path, text, *run, **gpus))["driver"]
        assert (driver["cpus"], driver["ranks"]) == (own_cpu(0), [[CPUS[0]], [CPUS[1]]])

    def test_errors_of_the_hook_are_reported_once(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """If the hook fails, the program continues, and one line reports the error."""
        text = """
os.environ["NUMAPIN_CHILDREN"] = "rubbish\\nLOCAL_RANK\\nmore"
import torch
torch.cuda.set_device(0)
torch.cuda.set_device(1)
show("end")
"""
        done = python(tmp_path, text, **gpus)
        assert shown(done)["end"]["cpus"] == [CPUS]
        assert done.err.count("this process is not bound") == 1
        assert "Traceback" not in done.err

    def test_other_numapin_beside_the_script(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """A module of the program's that is called numapin is not taken for numapin."""
        script(tmp_path, "raise SystemExit('the wrong one')", "numapin.py")
        done = python(tmp_path, "import torch\ntorch.cuda.set_device(1)\nshow('end')", **gpus)
        assert shown(done)["end"]["cpus"] == own_cpu(1)

    def test_run_folder_that_is_gone(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """A process that outlives the command is bound, but leaves no record, because the run's folder is gone."""
        text = """
import glob, shutil, torch
shutil.rmtree(glob.glob(sys.argv[1])[0])
torch.cuda.set_device(0)
show("end")
"""
        done = python(tmp_path, text, f"{tmp_path}/numapin-*", **gpus)
        assert shown(done)["end"]["cpus"] == own_cpu(0)
        assert "warning: no" not in done.err
        strict = python(tmp_path, text, f"{tmp_path}/numapin-*", options=("--strict",), **gpus)
        assert strict.status == 5
        assert "is gone, so it is unknown which processes were bound" in strict.err


class TestRefusals:
    """Inputs that make no sense, and --strict."""

    @pytest.mark.parametrize(
        ("options", "status", "problem"),
        [
            (("--nic-env", "ucx"), 2, "--children and --nic-env cannot be combined"),
            (("--gpus", "9"), 2, "hint: --gpus lists GPUs"),  # not: --nproc-per-node 9
            (("--", ""), 2, "the command is empty"),
            ((), 4, "no GPU is visible"),
        ],
    )
    def test_options(self, gpus: dict[str, Any], options: tuple[str, ...], status: int, problem: str) -> None:
        """One error, and the command does not start."""
        hidden = {} if options else {"CUDA_VISIBLE_DEVICES": ""}
        done = start("echo", "started", options=options, **{**gpus, **hidden})
        assert (done.status, done.out) == (status, "")
        assert problem in done.err

    def test_both_bind(self, gpus: dict[str, Any]) -> None:
        """What is on by default is off in the command, unless the user has set the variable."""
        names = ("SGLANG_AUTO_NUMA_BIND", "TLLM_NUMA_AWARE_WORKER_AFFINITY", "NRL_DISABLE_NUMA_BINDING")
        done = start("printenv", *names, TLLM_NUMA_AWARE_WORKER_AFFINITY="1", **gpus)
        assert done.out.split() == ["0", "1", "1"]

    def test_no_child_took_one(self, gpus: dict[str, Any]) -> None:
        """If no process took a GPU, a line at the end says so, and names what keeps numapin out."""
        done = start(sys.executable, "-I", "-c", "print('ran')", **gpus)
        assert (done.status, done.out) == (0, "ran\n")
        assert "-I ignores PYTHONPATH, so that process cannot be bound" in done.err
        assert done.err.count("no Python process below the command was seen to use a GPU") == 1
        assert start(sys.executable, "-I", "-c", "", options=("--strict",), **gpus).status == 2
        strict = start("true", options=("--strict",), **gpus)
        assert strict.status == 5
        assert "error: --strict: no Python process below the command was seen to use a GPU" in strict.err

    def test_strict_ends_a_process(self, gpus: dict[str, Any], tmp_path: Path) -> None:
        """A process whose GPU is unknown ends with status 5 under --strict, and the command's success becomes 5."""
        text = """
import subprocess
if sys.argv[1:]:
    import torch
    torch.cuda.set_device(7)
    show("went on")
else:
    show("child", status=subprocess.run([sys.executable, __file__, "child"]).returncode)
"""
        done = python(tmp_path, text, options=("--strict",), **gpus)
        assert done.status == 5
        assert [json.loads(line)["status"] for line in done.out.splitlines()] == [5]
        assert "there is no device 7: the command sees 2" in done.err
        plain = python(tmp_path, text, **gpus)
        assert [json.loads(line)["name"] for line in plain.out.splitlines()] == ["went on", "child"]
        assert f"({sys.executable}) is not bound: there is no device 7" in plain.err
        assert plain.err.count("there is no device 7") == 1
        assert "no Python process" not in plain.err


@needs_two_cpus
def test_bind_this_process(gpus: dict[str, Any], tmp_path: Path) -> None:
    """The call binds all threads, returns why, and a second call replaces the first."""
    text = """
import threading, numapin
end = threading.Event()
threading.Thread(target=end.wait).start()
first = numapin.bind_this_process(1, bind="exclusive")
show("first", reason=first.reason, gpu=first.gpu.uuid, before=sum(first.allocated_before.values()))
second = numapin.bind_this_process("cuda:0", bind="exclusive", strict=True)
show("second", reason=second.reason, away=second.away_bytes)
third = numapin.bind_this_process("GPU-00000001-0000-0000-0000-000000000000")
show("third")
os.sched_setaffinity(0, {int(sys.argv[1])})  # as taskset does
numapin.bind_this_process(0)
show("taskset")
end.set()
for device in (5, -1, "cpu", None, "GPU-77", 1.5):
    try:
        numapin.bind_this_process(device)
    except numapin.UsageError as error:
        assert error.hint
    else:
        raise AssertionError(device)
"""
    done = call(sys.executable, script(tmp_path, SHOW + text), str(CPUS[1]), **gpus)
    found = shown(done)
    assert found["taskset"]["cpus"] == own_cpu(1)
    assert (found["first"]["cpus"], found["second"]["cpus"], found["third"]["cpus"]) == (own_cpu(1), own_cpu(0), [CPUS])
    assert found["first"]["gpu"] == GPUS[1].uuid
    assert found["first"]["before"] > 1 << 20
    assert "exclusive core" in found["first"]["reason"]
    assert done.err == ""


@needs_two_cpus
def test_bind_this_process_below_the_command(gpus: dict[str, Any], tmp_path: Path) -> None:
    """A process that the command's plan has bound may ask for its whole node, or for another GPU by its address."""
    text = """
import numapin
numapin.bind_this_process(" 41:00.0 ")
show("planned")
numapin.bind_this_process(0, bind="node")
show("node")
numapin.bind_this_process(0, bind="exclusive")
numapin.bind_this_process(0, bind="node")
show("again")
"""
    found = shown(start("env", "LOCAL_RANK=1", sys.executable, script(tmp_path, SHOW + text), **gpus))
    assert (found["planned"]["cpus"], found["node"]["cpus"], found["again"]["cpus"]) == (own_cpu(0), [CPUS], [CPUS])
