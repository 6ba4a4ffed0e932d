"""The command lines of the recorded job scripts, and those that are refused. `{dgx}` is a file of MACHINES."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner

from tests.jobs.seam import job
from tests.pictures import golden_machine

ENGINES = [name for name in job.commands if name != "kubernetes"]
"""Those whose scripts are for bash."""

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

_POD_SIZE = "--cpus-per-task 8 --mem-per-node 8G"
_POD = f"--gpus-per-node 4 {_POD_SIZE} --container a"
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
    "slurm-task-requeued": "slurm --form task --nodes 2 --gpus-per-node 8 --time 2h --signal 60 --requeue train.py",
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
    " --dataloader numapin train.py",
    "kubernetes-leaderworkerset": "kubernetes --form leaderworkerset --nodes 2 --gpus-per-node 8 --cpus-per-task 96"
    " --mem-per-node 500G --container a/b:c --dataloader numapin --env-from secret/rendezvous --partition serving"
    " -m package.server",
    "kubernetes-claims": "kubernetes --gpus-per-node 2 --cpus-per-task 16 --mem-per-node 64G --container a/b:c"
    " --dataloader numapin --device-class gpu.nvidia.com --device-class dranet --match-attribute"
    " resource.kubernetes.io/pcieRoot train.py",
    "pbs-node": f"pbs --nodes 2 --machine {{dgx}} {_QUEUED} --account physics train.py --lr 0.1",
    "pbs-task": "pbs --form task --nodes 2 --gpus-per-node 4 --cpus-per-task 8 --time 12h --mem-per-node 100G train.py",
    "lsf-node": f"lsf --nodes 2 --gpus-per-node 6 {_QUEUED} --account physics train.py --lr 0.1",
    "lsf-task": "lsf --form task --nodes 2 --gpus-per-node 6 --cpus-per-task 7 --mem-per-node 300G --no-smt train.py"
    " --lr 0.1",
    "lsf-share": "lsf --nodes 2 --gpus-per-node 2 --machine {dgx} train.py",
    "slurm-fewer-cpus": "slurm --machine {dgx} --cpus-per-task 128 train.py",
    "slurm-few-ranks": "slurm --form task --gpus-per-node 8 --nproc-per-node 2 --cpus-per-task 3 train.py",
    "slurm-plan": "slurm --form task --gpus-per-node 4 --cpus-per-task 3 --plan a\\ plan\\'s.json --strict train.py",
    "slurm-amd": "slurm --machine {amd} --container a.sif train.py",
    "slurm-intel": "slurm --machine {intel} --container a.sif train.py",
    "slurm-typed-array": "slurm --nodes 2 --gpus-per-node a100:8 --array 0-9 --signal 60 --time 2h --requeue"
    " --directive=--constraint=ib --directive '-o logs/%j.out' train.py",
    "pbs-array": "pbs --gpus-per-node 4 --cpus-per-task 8 --array 0-99:2%4 --time 1h --signal 60 --directive '-m e'"
    " --setup module\\ load\\ openmpi train.py",
    "lsf-typed": "lsf --gpus-per-node NVIDIAA100-SXM4-80GB:4 --cpus-per-task 8 --directive '-R select[ib]' train.py",
    "mpi-no-gpu": "mpi --gpus-per-node 0 train.py --token=abc 'two\nlines'",
    "pbs-share": "pbs --gpus-per-node 4 --machine {dgx} train.py",
    "lsf-program": "lsf --form task --gpus-per-node 0 --no-python ./train.sh",
    "kubernetes-additions": f"kubernetes --nodes 2 {_POD} --volume pvc/data:/data --volume secret/key:/k/"
    " --volume configmap/a.b:/c:ro --volume emptydir:/scratch:rw --volume emptydir:/dev/shm --volume '/mnt/nvme 0:/a b'"
    " --toleration gpu --toleration a.b/gpu:NoExecute --toleration gpu=yes --toleration gpu=:NoSchedule --env A=b=c"
    " --env-from configmap/site --resource rdma/ib=1 --resource hugepages-2Mi=4Gi --scheduler mine"
    " --ttl 2h train.py",
    "kubernetes-jobset-claims": f"kubernetes --form jobset --nodes 2 {_POD} --queue team"
    " --device-class gpu.nvidia.com --match-attribute resource.kubernetes.io/pcieRoot train.py",
    "kubernetes-jobset-one-node": f"kubernetes --form jobset {_POD} train.py",
    "kubernetes-trainjob-annotated": f"kubernetes --form trainjob --nodes 2 {_POD} --annotation a.b/c=d train.py",
    "kubernetes-trainjob-one-node": f"kubernetes --form trainjob {_POD} --device-class gpu train.py",
    "kubernetes-leaderworkerset-two-nodes": f"kubernetes --form leaderworkerset --nodes 2 {_POD} train.py",
    "kubernetes-leaderworkerset-one-node": f"kubernetes --form leaderworkerset {_POD} train.py",
    "kubernetes-restricted": f"kubernetes --nodes 2 {_POD} --pod-security restricted --seccomp-profile numa.json"
    " --time 2h train.py",
    "kubernetes-profile": f"kubernetes --form jobset {_POD} --seccomp-profile numa.json --ipc-lock train.py",
    "kubernetes-baseline": f"kubernetes --form trainjob {_POD} --pod-security baseline train.py",
    "kubernetes-amd": "kubernetes --machine {amd} --container a train.py",
    "kubernetes-intel": "kubernetes --machine {intel} --gpus-per-node 3 --container a train.py",
}

REFUSED: dict[str, tuple[str, ...]] = {
    "nosuch": ("",),
    "slurm": ("", "--gpus 8", "--gpus-per-node=-2", "-m --no-python"),
    "slurm --gpus-per-node 4": (
        *("--nodes 0", "--nodes=-1", "--nodes many", "--nodes 9999999", "--ranks-per-node 5", "--cpus-per-task 0"),
        *("--time soon", "--time 4:00", "--time 60", "--time 0:00:00", "--time 1-30:00:00"),
        *("--time '4:00:00\n#SBATCH --uid=0'", "--signal 60", "--signal 60 --time 1m", "--signal 0 --time 1h"),
        *("--job-name 'a \"b\"\n#SBATCH'", f"--job-name {'x' * 64}", "--job-name \u0661", "--partition 'gpu; rm'"),
        *("--partition 'a\n  b: c'", "--account 'a b'", "--mem-per-node lots", "--mem-per-node 1K"),
        *("--bind none --cpus-per-rank 2", "--gpus 0,,1", "--gpus 0,1", "--gpus 4", "--form task --gpus 0,1"),
        *("--plan p.json", "--form task --plan p.json --no-smt", "--form task --dataloader numapin"),
        *("--array ''", "--array a", "--array 1-", "--array 1,", "--array 0-9%", "--array 0-9%0", "--array 0-9:0"),
        *("--gpus-per-node a100", "--gpus-per-node :8", "--gpus-per-node 'a b:8'", "--directive exclusive"),
        *("--directive=--nodes=3", "--directive '-t 5' --time 1h", "--directive '--a\n--b'"),
        *("--directive=--nod=3", "--directive=--no-requeue --requeue"),
        *("--array '1 2'", "--array=-1", "--array '1\n#SBATCH'", "--array 9-1", "--env A=1", "--hostfile h"),
        *("--container 'a b:c'", "--container=--privileged", "--container dockerd://a", "--container docker://"),
        *("--container docker:///a", "--container 'docker://#a'", "--container 'a#'", "--container 'nvcr.io#'"),
        *("--container nvcr.io/", "--container 'nvcr.io##a'", "--container 'me@nvcr.io#'", "--container a//b"),
        *("--container a:", "--container a@", "--container 'nvcr.io#nvidia/a:'", "--container oras://"),
        *("--container library://", "--container https://"),
    ),
    "slurm --machine {dgx}": (
        *("--gpus-per-node 9", "--gpus 0,8", "--bind exclusive --cpus-per-rank 64 --strict", "--cpus-per-task 257"),
        *("--form task --gpus-per-node 0 --ranks-per-node 200", "--form task --cpus-per-task 33", "--mem-per-node 90T"),
    ),
    "mpi --gpus-per-node 4": (
        *("--gpus-per-node a100:4", "--directive=-x", "--nodes 0"),
        *("--container /images/a.sqsh", "--time 1h", "--requeue"),
    ),
    "pbs --gpus-per-node 4": ("",),
    "pbs --gpus-per-node 4 --cpus-per-task 4": (
        *("--array 1", "--array 1,2", "--array 0-3:2,5-9", "--gpus-per-node a100:4", "--directive '-l select=1'"),
        "--directive=-Nname",
    ),
    "kubernetes --gpus-per-node 4": (
        *("", "--gpus 8", "--nodes 0", f"{_POD_SIZE} --container /a.sif", "--mem-per-node 8G --container a"),
        *("--cpus-per-task 8 --container a", _POD_SIZE, f"{_POD_SIZE} --container a --job-name 'a\nb: c'"),
    ),
    f"kubernetes --nodes 2 {_POD}": (
        *("--ipc-lock --pod-security baseline", "--volume /mnt:/data --pod-security restricted"),
        *("--pod-security none", "--seccomp-profile ''", "--gpus-per-node a:4"),
        *("--account b", "--form mpijob", "--env A", "--env =b", "--env A=1 --env A=2"),
        *("--env PET_NNODES=3", "--env PET_RDZV_ID=3", "--env-from wandb", "--env-from secret/"),
        *("--pull-secret a --pull-secret a", "--volume data", "--volume data:/data", "--volume pvc/data:data"),
        *("--volume pvc/data:/", "--volume pvc/data:/data:rx", "--volume pvc/:/data", "--volume :/data"),
        *(
            "--volume pvc/a:/data --volume pvc/b:/data/",
            "--resource rdma/ib",
            "--resource rdma/ib=",
            "--resource cpu=4",
        ),
        *("--resource nvidia.com/gpu=4", "--resource a/b=1 --resource a/b=2", "--node-selector pool"),
        *("--node-selector a=1 --node-selector a=2", "--annotation a", "--annotation a=1 --annotation a=1"),
        *("--toleration ''", "--toleration gpu:", "--service-account ''", "--queue 'team\n  a: b'"),
        *("--ttl soon", "--match-attribute a.b/c", "--device-class gpu --device-class gpu"),
        *("--device-class gpu --gpus-per-node 0", "--device-class a --device-class b --gpus-per-node 17"),
        *("--form trainjob --ttl 1h", "--form leaderworkerset --time 1h", "--form leaderworkerset --ttl 1h"),
        "--form leaderworkerset --requeue",
    ),
}
"""Options that are refused, by the line that they are added to. The script's name follows, and a file for --output."""

# The machine files that lines name: a DGX A100 (GPU pairs on nodes 3, 1, 7 and 5 of 8; 128 cores, 1 TiB) and others.
MACHINES = {"dgx": "2pkg-8node-smt2-8gpu-pairs", "amd": "1pkg-4node-smt2-8amd", "intel": "2pkg-2node-2intel-2tile"}


def machine_files(folder: Path) -> dict[str, str]:
    for name, golden in MACHINES.items():
        (folder / f"{name}.json").write_text(json.dumps(golden_machine(golden).to_json()))
    return {name: str(folder / f"{name}.json") for name in MACHINES}


def write(arguments: Sequence[str]) -> str:
    done = CliRunner().invoke(job, list(arguments), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


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
