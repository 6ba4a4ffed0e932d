"""The command lines of the recorded job scripts. `{dgx}` is a machine file of a DGX A100."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.testing import CliRunner

from tests.jobs.seam import job

if TYPE_CHECKING:
    from collections.abc import Sequence

_MACHINES = Path(__file__).resolve().parents[1] / "machines" / "golden"

HOSTILE_SCRIPT = "a b'c\"$(x)\n.py"
HOSTILE_ARGUMENTS = (
    "two\nlines",
    "$(touch gone)",
    "`id`",
    "",
    " ",
    "--",
    "-x",
    "ünï 🜁",
    "\\",
    "a'b",
    'a"b',
    "$HOME",
    "!1",
    "\x1b[31mred\x1b]0;title\x07",
    "\x9b2J\x85\u202eexe.\u2066\u200e\u061c\u2028\u2029",
    "it's\t\r\x7f\\e\\\x1b0",
)
HOSTILE = (HOSTILE_SCRIPT, *HOSTILE_ARGUMENTS)

_QUEUED = "--time 1-12:00:00 --signal 300 --requeue --partition gpu"

CASES: dict[str, str] = {
    "slurm-one-node": "slurm --gpus-per-node 4 train.py --lr 0.1",
    "slurm-node": f"slurm --nodes 4 --machine {{dgx}} {_QUEUED} --account physics --bind socket --memory bind=0,2"
    " --dataloader numapin --job-name train-7b train.py --lr 0.1",
    "slurm-task": "slurm --form task --nodes 2 --gpus-per-node 8 --cpus-per-task 16 --mem-per-node 500G --no-smt"
    " --strict --time 90m --setup module\\ load\\ cuda -m package.train",
    "slurm-pyxis": "slurm --form task --nodes 2 --gpus-per-node 8 --container nvcr.io/nvidia/pytorch:25.01-py3"
    " train.py",
    "slurm-apptainer": "slurm --nodes 2 --gpus-per-node 8 --container images/torch.sif --no-python ./train.sh",
    "slurm-share": "slurm --nodes 2 --gpus-per-node 2 --machine {dgx} train.py",
    "slurm-array": "slurm --form task --nodes 2 --gpus-per-node 8 --array 0-7%2 train.py",
    "mpi-node": "mpi --nodes 2 --gpus-per-node 8 --hostfile my\\ hosts --bind exclusive --cpus-per-rank 4"
    " train.py --lr 0.1",
    "mpi-task": "mpi --form task --gpus-per-node 8 --container registry/image:tag --setup module\\ load\\ openmpi"
    " train.py",
    "kubernetes-one-node": "kubernetes --gpus-per-node 2 --cpus-per-task 16 --mem-per-node 64G --container a/b:c"
    " train.py",
    "kubernetes-job": f"kubernetes --nodes 2 --machine {{dgx}} {_QUEUED} --container registry/image:tag"
    " --dataloader numapin --bind socket train.py --lr 0.1",
    "kubernetes-jobset": f"kubernetes --form jobset --nodes 2 --machine {{dgx}} {_QUEUED} --ttl 24h --container a/b:c"
    " --dataloader numapin --env NCCL_DEBUG=INFO --env-from secret/wandb --volume pvc/datasets:/data:ro --volume"
    " /mnt/nvme:/scratch --resource rdma/ib=8 --ipc-lock --node-selector pool=gpu"
    " --toleration nvidia.com/gpu:NoSchedule --pull-secret registry --service-account trainer"
    " --annotation k8s.v1.cni.cncf.io/networks=ib0 train.py",
    "kubernetes-trainjob": f"kubernetes --form trainjob --nodes 2 --machine {{dgx}} {_QUEUED} --container a/b:c"
    " --dataloader numapin --gang coscheduling train.py",
    "kubernetes-leaderworkerset": "kubernetes --form leaderworkerset --nodes 2 --gpus-per-node 8 --cpus-per-task 96"
    " --mem-per-node 500G --container a/b:c --dataloader numapin --env-from secret/rendezvous --partition serving"
    " -m package.server",
    "kubernetes-claims": "kubernetes --gpus-per-node 2 --cpus-per-task 16 --mem-per-node 64G --container a/b:c"
    " --dataloader numapin --gang volcano --device-class gpu.nvidia.com --device-class dranet --match-attribute"
    " resource.kubernetes.io/pcieRoot train.py",
    "pbs-node": f"pbs --nodes 2 --machine {{dgx}} {_QUEUED} --account physics train.py --lr 0.1",
    "pbs-task": "pbs --form task --nodes 2 --gpus-per-node 4 --cpus-per-task 8 --time 12h --mem-per-node 100G train.py",
    "lsf-node": f"lsf --nodes 2 --gpus-per-node 6 {_QUEUED} --account physics train.py --lr 0.1",
    "lsf-task": "lsf --form task --nodes 2 --gpus-per-node 6 --cpus-per-task 7 --mem-per-node 300G --no-smt train.py"
    " --lr 0.1",
    "lsf-share": "lsf --nodes 2 --gpus-per-node 2 --machine {dgx} train.py",
}


def dgx(folder: Path) -> Path:
    """Write the machine file of a DGX A100: GPU pairs on nodes 3, 1, 7 and 5 of 8."""
    golden = json.loads((_MACHINES / "2pkg-8node-smt2-8gpu-pairs.json").read_text())
    path = folder / "dgx.json"
    path.write_text(json.dumps(golden["topology"]))
    return path


def write(arguments: Sequence[str]) -> str:
    """Return the output of `numapin job`, run in this process. Raises its errors."""
    done = CliRunner().invoke(job, list(arguments), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def refusal(arguments: Sequence[str]) -> str:
    """Return the error message of `numapin job`, with its hint."""
    try:
        write(arguments)
    except click.ClickException as error:
        return error.format_message()
    except Exception as error:  # noqa: BLE001 - the test looks at the text, and which class gives it is tested below
        return f"{type(error).__name__}: {error}"
    return ""


def expanded(text: str) -> str:
    """Expand a word as Kubernetes does: `$$` is a dollar, `$(NAME)` a variable, and any other dollar itself."""
    out, rest = "", text
    while rest:
        if rest.startswith("$$"):
            out, rest = out + "$", rest[2:]
        else:
            assert not rest.startswith("$("), f"{text!r} would be expanded"
            out, rest = out + rest[0], rest[1:]
    return out
