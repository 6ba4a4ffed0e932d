"""numapin without torch: all commands work that neither meet other hosts nor measure torch.

With torch installed, each command runs in an interpreter that does not find it; without, as it is (scripts/trial.sh).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

NUMAPIN: Final = (sys.executable, "-m", "numapin")
# What the import system does where torch is not installed: nothing is found, and nothing raises.
HIDE_TORCH: Final = """\
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_others(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "torch" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(find_others)
"""
SCRIPT: Final = "import os; print(f'rank {os.environ[\"RANK\"]}', flush=True)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a script that does not import torch, and with what hides torch."""
    made = tmp_path_factory.mktemp("without")
    (made / "script.py").write_text(SCRIPT)
    if find_spec("torch") is not None:
        (made / "hidden").mkdir()
        (made / "hidden" / "sitecustomize.py").write_text(HIDE_TORCH)
    return made


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run numapin in the folder, without torch."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NUMAPIN_BINDING")}
    paths = [str(folder / "hidden"), *([str(Path.cwd())] if Path("numapin").is_dir() else [])]
    environ = {**kept, "PYTHONPATH": os.pathsep.join(paths), "NUMAPIN_RUN_DIR": str(folder)}
    return subprocess.run(
        [*NUMAPIN, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=100
    )


def test_torch_is_hidden(folder: Path) -> None:
    """The commands below do not find torch; else none of these tests would mean anything."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    result = call(folder, "exec", "--local-rank", "0", "--local-size", "1", "--", sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("topo", "node 0"),
        ("topo --machine example:dgx-a100 --format svg", "<svg"),
        ("plan --machine example:dgx-a100", "mlx5_0"),
        ("job slurm --nodes 2 --gpus-per-node 8 --time 1h train.py", "#SBATCH"),
        ("job kubernetes --gpus-per-node 8 --container registry/image:tag --machine example:p4d train.py", "kind:"),
        ("exec --local-rank 0 --local-size 1 -- echo bound", "bound"),
        ("completion bash", "complete"),
        ("run --help-all", "--rdzv-backend"),
        ("run --nproc-per-node 2 script.py", "rank 1"),
        ("run --dry-run --nproc-per-node 2 script.py", "OMP_NUM_THREADS"),
        ("--version", "version"),
    ],
)
def test_works_without_torch(folder: Path, line: str, says: str) -> None:
    """These need no torch; `run` does not, as long as torch does not serve its store."""
    result = call(folder, *line.split())
    assert result.returncode == 0, result.stderr
    assert says in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["verify", "top"])
def test_running_jobs_without_torch(folder: Path, command: str) -> None:
    """They look at a process, here pytest's, and show it as a rank."""
    result = call(folder, command, *(["--once"] if command == "top" else []), "--pid", str(os.getpid()))
    assert "No module named" not in result.stderr
    assert result.returncode in (0, 1), result.stderr
    assert "rank" in result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "run --nnodes 1:2 script.py",
        "run --rdzv-backend static --rdzv-endpoint localhost:29500 script.py",
        "run --nproc-per-node xpu script.py",
        "bench transfer --quick",
        "bench alloc --quick",
        "bench overlap --quick",
        "bench loader --quick",
        "compare script.py",
        "trace script.py",
    ],
)
def test_says_how_to_install_torch(folder: Path, line: str) -> None:
    """What needs torch says so in one error, with the command that installs it, and starts nothing."""
    result = call(folder, *line.split())
    assert result.returncode == 2, result.stderr
    assert "needs torch, which is not installed" in result.stderr
    assert "pip install 'numapin[torch]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert "rank 0" not in result.stdout


@pytest.mark.parametrize("name", ["DataLoader", "batch_buffer", "pinned"])
def test_names_of_the_package(folder: Path, name: str) -> None:
    """What needs torch says which extra has it; the other names are there."""
    code = f"import numapin; numapin.make_plan, numapin.spawn, numapin.Request; numapin.{name}"
    result = call(folder, "exec", "--local-rank", "0", "--local-size", "1", "--", sys.executable, "-c", code)
    assert result.returncode == 1
    assert f"ModuleNotFoundError: numapin.{name} needs torch: pip install 'numapin[torch]'" in result.stderr
