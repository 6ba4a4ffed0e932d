"""On machines with GPUs: the model of CUDA_VISIBLE_DEVICES, NCCL training, and a launcher that does not use CUDA."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from numapin import discover
from tests.integration.launching import NUMAPIN, Done, call

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA_SEES = """
import ctypes, uuid
cuda, count, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
if cuda.cuInit(0) == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
def uuid_of(device):
    assert cuda.cuDeviceGetUuid_v2(name, device) == 0
    return "GPU-" + str(uuid.UUID(bytes=bytes(name)))
print([uuid_of(device) for device in range(count.value)])
"""


def gpu_uuids() -> list[str]:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return listed.stdout.split()


UUIDS = gpu_uuids()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not UUIDS, reason="no NVIDIA GPU here (nvidia-smi)")]


pytestmark = needs_gpu
needs_two_gpus = pytest.mark.skipif(len(UUIDS) < 2, reason="fewer than two NVIDIA GPUs here")


def run(*arguments: str, status: int = 0, **changes: str) -> Done:
    done = call(*NUMAPIN, "run", *arguments, cwd=None, **changes)
    assert done.status == status, done.err
    return done


@pytest.mark.parametrize(
    "value",
    [
        *(None, "", "0", " 0", "0 ", "1,0", "0,9,1", "9,0", "-1,0", "0,-1,1", "0,0", "0,1,0", "0,,1", "0x,1"),
        *("0,junk", "NoDevFiles", "{u0}", "{u1},{u0}", "{u0:.12},{u1}", "GPU-", "{u0},{u0}", "{u0},1", "0,{u1}"),
        "{U0}",
    ],
)
def test_like_the_driver(value: str | None) -> None:
    """The model returns the same GPUs in the same order as CUDA itself."""
    names = {"u0": UUIDS[0], "u1": UUIDS[-1], "U0": UUIDS[0].upper()}
    text = None if value is None else value.format(**names)
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    # Ask the driver itself: torch.cuda.device_count() has its own model, which differs for odd values.
    asked = subprocess.run(
        [sys.executable, "-c", CUDA_SEES], capture_output=True, text=True, check=True, env=environment
    )
    modeled = [gpu.uuid for gpu in discover(environ=environment).visible_gpus]
    assert str(modeled) == asked.stdout.strip(), text


def test_one_gpu() -> None:
    """With one visible GPU there is one rank, which trains on it."""
    done = run(str(REPOSITORY / "examples/train_ddp.py"), CUDA_VISIBLE_DEVICES=UUIDS[-1])
    assert "on 1 ranks (cuda)" in done.out


@pytest.mark.multigpu
@needs_two_gpus
def test_all_gpus() -> None:
    """Without a number of ranks, there is one rank per visible GPU."""
    done = run(str(REPOSITORY / "examples/train_ddp.py"))
    assert f"on {len(UUIDS)} ranks (cuda)" in done.out


@pytest.mark.multigpu
@needs_two_gpus
def test_a_rank_that_waits_in_nccl(tmp_path: Path) -> None:
    """The block of a job that fails says where it waited, although its main thread runs no Python code."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time, torch, torch.distributed as dist\n"
        "rank = int(os.environ['RANK'])\n"
        "torch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.ones(1, device='cuda'))\n"
        "torch.cuda.synchronize()\n"
        "def wait():\n"
        "    dist.all_reduce(torch.ones(1, device='cuda'))\n"
        "    open(sys.argv[1], 'w').close()\n"
        "    torch.cuda.synchronize()\n"
        "if rank == 0: wait()\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "raise ValueError('the first')\n"
    )
    done = run("--quiet", "--nproc-per-node", "2", str(script), str(tmp_path / "waits"), status=1)
    block = " ".join(done.err.rpartition("numapin: error: ")[2].split())
    assert "rank 1, the first to fail" in block, done.err
    assert "failed ValueError: the first" in block, done.err
    assert re.search(r"were in rank 0: \w+, train\.py:(9|10) ", block), done.err


@pytest.mark.multigpu
@needs_two_gpus
def test_gpus_option(tmp_path: Path) -> None:
    """--gpus gives rank 0 the GPU that is named first, by UUID."""
    script = tmp_path / "seen.py"
    script.write_text(
        "import os, json, torch\n"
        "rank = int(os.environ['LOCAL_RANK'])\n"
        "seen = 'GPU-' + str(torch.cuda.get_device_properties(rank).uuid)\n"
        "planned = json.loads(os.environ['NUMAPIN_BINDING'])['gpu']['uuid']\n"
        "os.write(1, (json.dumps([rank, seen, planned]) + '\\n').encode())  # in one piece: ranks share the pipe\n"
    )
    done = run("--gpus", "1,0", str(script))
    told = sorted(json.loads(line) for line in done.out.splitlines())
    assert told == [[0, UUIDS[1], UUIDS[1]], [1, UUIDS[0], UUIDS[0]]]


def test_launcher_leaves_cuda_alone(tmp_path: Path) -> None:
    """While a rank uses its GPU, the rank has a GPU device open and the launcher has none."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, json, torch\n"
        "torch.ones(1, device='cuda')\n"
        "def devices(pid):\n"
        "    links = [f'/proc/{pid}/fd/{fd}' for fd in os.listdir(f'/proc/{pid}/fd')]\n"
        "    open_files = {os.readlink(link) for link in links if os.path.lexists(link)}\n"
        "    return sorted(path for path in open_files if '/dev/nvidia' in path)\n"
        "print(json.dumps([devices(os.getppid()), devices('self')]))\n"
    )
    done = run("--nproc-per-node", "1", str(script))
    launcher, rank = json.loads(done.out)
    assert launcher == []
    assert rank != []
