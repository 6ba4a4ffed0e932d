"""numapin under a real Slurm: `srun numapin run`, `srun numapin exec`, and the scripts of `numapin job slurm`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.cluster import output_in
from tests.engines.told import PROBE, assert_own_cores, met_in
from tests.integration.launching import numapin
from tests.needs import needs_two_cpus
from tests.nvml.fake import FakeGpu, render
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.engines.cluster import Cluster
    from tests.nvml.fake import FakeNvml

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("engines"), pytest.mark.timeout(600)]
HERE = Path(__file__).resolve().parent
SRUN = ("srun", "--cpu-bind=none")
TORCHRUNS = {
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "gone",
    "TORCHELASTIC_RUN_ID": "outer",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
"""Variables of a rank of torchrun."""


@needs_two_cpus
def test_exec_in_every_task(cluster: Cluster, tmp_path: Path) -> None:
    """Each of two tasks per machine is bound to its own cores by its SLURM_LOCALID."""
    ranks = 'export RANK=$SLURM_PROCID; exec "$@"'
    program = ("numapin", "exec", "--bind=exclusive", "--", "python", PROBE, str(tmp_path), "--alone")
    words = (*SRUN, "--nodes=2", "--ntasks-per-node=2", "sh", "-c", ranks, "sh", *program)
    done = cluster.call(*words, folder=tmp_path)
    assert done.status == 0, done.err
    assert_own_cores(tmp_path, "node1", "node2")


def test_exec_outside_of_a_step(cluster: Cluster, tmp_path: Path) -> None:
    """A batch script and salloc's shell are not tasks of srun, although Slurm sets SLURM_LOCALID for both."""
    line = "numapin exec -- true; echo status $?"
    job = cluster.submit(f"#!/bin/bash\n#SBATCH --output={tmp_path}/job.out\nexec 2>&1; {line}\n", folder=tmp_path)
    cluster.ended(job, folder=tmp_path)
    shell = cluster.call("salloc", "-n1", "srun", "--interactive", "bash", "-c", f"exec 2>&1; {line}", folder=tmp_path)
    for told in (output_in(tmp_path), shell.out):
        assert "SLURM_LOCALID=0 is ignored outside a job step" in told
        assert "status 2" in told


def test_exec_takes_the_gpu_that_slurm_gave(cluster: Cluster, fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """With --gpus-per-task each task sees one GPU in its CUDA_VISIBLE_DEVICES, and is bound near that GPU."""
    uuids = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in range(2)]
    gpus = [FakeGpu(uuid=uuid, pci=f"00000000:{number + 1:02X}:00.0") for number, uuid in enumerate(uuids)]
    environ = fake_nvml.environment(tmp_path, render(gpus))
    show = "import os; os.write(1, (os.environ['NUMAPIN_BINDING'] + chr(10)).encode())"
    words = (*SRUN, "--ntasks-per-node=2", "--gpus-per-task=1", "numapin", "exec", "--", "python", "-c", show)
    given = {name: environ[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_DATA")}
    done = cluster.call(*words, folder=tmp_path, **given)
    assert done.status == 0, done.err
    bindings = sorted(map(json.loads, done.out.splitlines()), key=lambda binding: int(binding["local_rank"]))
    assert [binding["gpu"]["uuid"] for binding in bindings] == uuids


@pytest.mark.parametrize("form", ["node", "task"])
def test_job_scripts(cluster: Cluster, tmp_path: Path, form: str) -> None:
    """Both forms of script start four bound ranks on two machines, which join one group, even from a rank of torchrun.

    Each machine's output has a file.
    """
    shape = ("--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2", "--time=10m", f"--form={form}")
    script = numapin("job", "slurm", *shape, PROBE, str(tmp_path))
    assert script.status == 0, script.err
    job = cluster.submit(script.out, folder=tmp_path, **TORCHRUNS)
    assert cluster.ended(job, folder=tmp_path) == "COMPLETED", output_in(tmp_path)
    ranks = met_in(tmp_path, size=4)
    assert [rank["host"] for rank in ranks] == ["node1", "node1", "node2", "node2"]
    assert {rank["cuda"] for rank in ranks} == {"0,1"}
    assert {path.name for path in tmp_path.glob("*.out")} == {
        f"probe-{job}{host}.out" for host in ("", "-node1", "-node2")
    }


def test_each_task_of_an_array_has_its_index(cluster: Cluster, tmp_path: Path) -> None:
    """Every index runs once, with its own log file."""
    shape = ("--gpus-per-node=1", "--cpus-per-task=1", "--mem-per-node=100M", "--time=10m", "--array=0-2%2")
    program = ("--no-python", "sh", "-c", f'touch "{tmp_path}/index-$SLURM_ARRAY_TASK_ID"')
    script = numapin("job", "slurm", *shape, *program)
    assert script.status == 0, script.err
    cluster.submit(script.out, folder=tmp_path)
    ended = wait_until(lambda: len(list(tmp_path.glob("index-*"))) == 3, limit_s=240)
    assert ended, f"{output_in(tmp_path)}{cluster.logs()}"
    assert {path.name for path in tmp_path.glob("index-*")} == {"index-0", "index-1", "index-2"}
    assert len(list(tmp_path.glob("sh-*_[0-2].out"))) == 3


@pytest.mark.parametrize("index", ["", "_4"], ids=["job", "array"])
def test_a_job_saves_and_goes_on_in_another_turn(cluster: Cluster, tmp_path: Path, index: str) -> None:
    """SIGUSR1 to the batch script, as sent by --signal, reaches every task; the job, or array task, then runs again."""
    options = ("--gpus-per-node=2", "--cpus-per-task=2", "--time=30m", "--signal=60", "--requeue", "--form=task")
    array = ("--array=4",) if index else ()
    script = numapin("job", "slurm", *options, *array, str(HERE / "saver.py"), str(tmp_path))
    job = cluster.submit(script.out, folder=tmp_path) + index
    _wait_for(cluster, job, tmp_path, "ready-*-0", number=2)
    assert cluster.call("scancel", "--batch", "--signal=USR1", job, folder=tmp_path).status == 0
    _wait_for(cluster, job, tmp_path, "resumed-*", number=2)
    assert cluster.ended(job, folder=tmp_path) == "COMPLETED", output_in(tmp_path)
    assert [(tmp_path / f"resumed-{rank}").read_text() for rank in (0, 1)] == ["turn 0 then turn 1"] * 2


@pytest.mark.parametrize("form", ["node", "task"])
def test_a_preempted_job_that_saves_in_its_grace_time_goes_on(cluster: Cluster, tmp_path: Path, form: str) -> None:
    """Slurm sends SIGTERM to all processes except the script's and waits; a job whose ranks end in time is requeued."""
    shape = ("--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2", "--time=30m", f"--form={form}")
    script = numapin("job", "slurm", *shape, "--requeue", "--partition=spare", str(HERE / "saver.py"), str(tmp_path))
    job = cluster.submit(script.out, folder=tmp_path)
    _wait_for(cluster, job, tmp_path, "ready-*-0", number=4)
    urgent = ("sbatch", "--partition=urgent", "--nodes=2", "--gpus-per-node=2", "--output=urgent.out", "--wrap=sleep 1")
    assert cluster.call(*urgent, folder=tmp_path).status == 0
    _wait_for(cluster, job, tmp_path, "resumed-*", number=4)
    assert cluster.ended(job, folder=tmp_path) == "COMPLETED", output_in(tmp_path)
    assert (tmp_path / "resumed-0").read_text() == "turn 0 then turn 1"
    assert " Restarts=1 " in cluster.shown(job)


def _wait_for(cluster: Cluster, job: str, folder: Path, pattern: str, *, number: int) -> None:
    """Wait until a job's ranks have written `number` files; fail if the job ends before."""

    def state() -> str:
        return output_in(folder) + cluster.shown(job) + cluster.logs()

    def there() -> bool:
        over = cluster.state_of(job) in {"FAILED", "COMPLETED"}
        found = len(list(folder.glob(pattern))) == number
        assert found or not over, state()
        return found

    assert wait_until(there, limit_s=240), f"not {number} files {pattern}\n{state()}"
