"""numapin without torch: all commands work that neither meet other hosts nor measure torch.

With torch installed, each command runs in an interpreter that does not find it; without, as it is (scripts/trial.sh).
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.integration.forking import CommandLine, Forker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[[str], tuple[int, str, str]]

pytestmark = pytest.mark.xdist_group("without torch")  # so that numapin is imported once
# What the import system does where torch is not installed: nothing is found, and nothing raises.
HIDE_TORCH: Final = """\
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_others(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "torch" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(find_others)
"""
SCRIPT: Final = "import os; print(f'rank {os.environ[\"RANK\"]}', flush=True)\n"
LOOK: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
NAMES: Final = "import sys, numapin; numapin.make_plan, numapin.spawn, numapin.Request; getattr(numapin, sys.argv[1])"
EXEC: Final = "exec --local-rank 0 --local-size 1 --"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Give a function that runs a command line of numapin's without torch; return status, stdout and stderr.

    Each runs in a fork of a process that has numapin imported, in a folder with scripts.
    """
    folder = tmp_path_factory.mktemp("without")
    for name, text in (("script.py", SCRIPT), ("look.py", LOOK), ("names.py", NAMES)):
        (folder / name).write_text(text)
    if find_spec("torch") is not None:
        (folder / "hidden").mkdir()
        (folder / "hidden" / "sitecustomize.py").write_text(HIDE_TORCH)
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NUMAPIN_BINDING")}
    paths = [str(folder / "hidden"), *([str(Path.cwd())] if Path("numapin").is_dir() else [])]
    environ = {**kept, "PYTHONPATH": os.pathsep.join(paths), "NUMAPIN_RUN_DIR": str(folder)}
    forker = Forker(environ, ("numapin.cli.main", "numapin.cli.entry"))

    def run(line: str) -> tuple[int, str, str]:
        words = line.replace("python", sys.executable).split()
        return forker.call(
            CommandLine(module="numapin", arguments=words, environ=environ, cwd=str(folder)), limit_s=100
        )

    yield run
    forker.close()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{EXEC} python look.py", ""),  # torch is hidden; else none of these tests would mean anything
        ("topo", "node 0"),
        ("topo --machine example:dgx-a100 --format svg", "<svg"),
        ("plan --machine example:dgx-a100", "mlx5_0"),
        ("job slurm --nodes 2 --gpus-per-node 8 --time 1h train.py", "#SBATCH"),
        ("job kubernetes --gpus-per-node 8 --container registry/image:tag --machine example:p4d train.py", "kind:"),
        (f"{EXEC} echo bound", "bound"),
        ("completion bash", "complete"),
        ("run --help-all", "--rdzv-backend"),
        ("run --nproc-per-node 2 script.py", "rank 1"),
        ("run --dry-run --nproc-per-node 2 script.py", "OMP_NUM_THREADS"),
        ("--version", "version"),
    ],
)
def test_works_without_torch(run: Run, line: str, says: str) -> None:
    """These need no torch; `run` does not, as long as torch does not serve its store."""
    status, out, err = run(line)
    assert status == 0, err
    assert says in out + err


@pytest.mark.parametrize("line", ["verify", "top --once"])
def test_running_jobs_without_torch(run: Run, line: str) -> None:
    """They look at a process, here pytest's, and show it as a rank."""
    status, out, err = run(f"{line} --pid {os.getpid()}")
    assert "No module named" not in err
    assert status in (0, 1), err
    assert "rank" in out


@pytest.mark.parametrize(
    "line",
    [
        "run --nnodes 1:2 script.py",
        "run --rdzv-backend static --rdzv-endpoint localhost:29500 script.py",
        "run --nproc-per-node xpu script.py",
        *(f"bench {name} --quick" for name in ("transfer", "alloc", "overlap", "loader")),
        "compare script.py",
        "trace script.py",
    ],
)
def test_says_how_to_install_torch(run: Run, line: str) -> None:
    """What needs torch says so in one error, with the command that installs it, and starts nothing."""
    status, out, err = run(line)
    assert status == 2, err
    assert "needs torch, which is not installed" in err
    assert "pip install 'numapin[torch]'" in err
    assert "Traceback" not in err
    assert "rank 0" not in out


def test_a_mistake_in_the_number_of_ranks(run: Run) -> None:
    """A word that is no device is an error of its own: torch is neither needed nor asked."""
    status, _, err = run("run --nproc-per-node two script.py")
    assert status == 2
    assert "--nproc-per-node is two; it must be a number, auto, cpu, gpu or xpu" in err
    assert "torch" not in err


@pytest.mark.parametrize("name", ["DataLoader", "batch_buffer", "pinned"])
def test_names_of_the_package(run: Run, name: str) -> None:
    """What needs torch says which extra has it; the other names are there."""
    status, _, err = run(f"{EXEC} python names.py {name}")
    assert status == 1
    assert f"ModuleNotFoundError: numapin.{name} needs torch: pip install 'numapin[torch]'" in err
