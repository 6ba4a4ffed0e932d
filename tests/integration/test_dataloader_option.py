"""`numapin run --dataloader=numapin`: the hook is in every Python of a rank, and does not disturb it otherwise.

`install` is a stand-in here: each script replaces numapin.data.install. test_frameworks.py uses the real one. Where the
question is which interpreters have the hook, torch is a stand-in, too: importing the real one takes 1.7 s of CPU time.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.launching import Done, call, numapin, script
from tests.integration.seam import _loaders_reported, handover, hook_env, printable

BASE_PYTHON: str = getattr(sys, "_base_executable", sys.executable)  # below a virtual environment
RUN = ("run", "--nproc-per-node", "1", "--quiet")

# Prints "installed" and counts the iterators that torch's class makes from then on.
STAND_IN = """
import os, sys, types
at_start = sorted({"torch", "numapin", "typing"} & sys.modules.keys())
def install():
    import torch.utils.data
    cls = torch.utils.data.DataLoader
    own = cls._get_iterator
    def taken(self):
        os.write(1, b"taken\\n")
        return own(self)
    cls._get_iterator = taken
    os.write(1, b"installed\\n")
sys.modules["numapin.data.install"] = types.ModuleType("numapin.data.install")
sys.modules["numapin.data.install"].install = install
"""
ITERATE = "from torch.utils.data import DataLoader\nlist(DataLoader(range(4)))\n"
SMALL_TORCH = """
class DataLoader:
    def __init__(self, dataset): self.dataset = dataset
    def _get_iterator(self): return iter(self.dataset)
    def __iter__(self): return self._get_iterator()
"""
STATE = """
import json, sys
module = sys.modules.get("sitecustomize")
if module: import sitecustomize
found = [getattr(module, "__file__", None), getattr(module, "mark", None)]
print(json.dumps([sys.path[1:], str(module), found, module is sys.modules.get("sitecustomize")]))
"""


def start(choice: str, *arguments: str, cwd: Path, program: str = sys.executable, **changes: str) -> Done:
    """Start Python with the environment that a rank gets under --dataloader CHOICE."""
    changes |= hook_env.environment(choice, changes)
    return call(program, *arguments, cwd=cwd, **changes)


def with_small_torch(folder: Path, content: str = SMALL_TORCH) -> Path:
    """Write a torch that has a DataLoader and nothing else, for scripts in this folder, and return the folder."""
    data = folder / "torch" / "utils" / "data"
    data.mkdir(parents=True)
    for package in (data.parent.parent, data.parent):
        script(package, "", "__init__.py")
    script(data, "from torch.utils.data.dataloader import *\n", "__init__.py")
    script(data, content, "dataloader.py")
    return folder


# Iterates loaders, first without workers, then with a forked and with a new one, then in other processes.
ITERATES = f"""{STAND_IN}
def work(i):
    from torch.utils.data import DataLoader
    list(DataLoader(range(4)))
class Data:
    def __len__(self): return 2
    def __getitem__(self, i): return os.getpid()
if __name__ == "__main__":
    print("at start", at_start, flush=True)
    import torch.multiprocessing
    from torch.utils.data import DataLoader
    print("loader", sorted(name for name in sys.modules if name.startswith("numapin")), flush=True)
    loader = DataLoader(range(4), batch_size=2)
    for _ in range(2): print([batch.tolist() for batch in loader], flush=True)
    import torch.utils.data.dataloader as module
    print(type(module.__loader__).__name__, vars(module.__loader__).keys() & {{"exec_module"}}, flush=True)
    print("workers", flush=True)
    for method in ("fork", "spawn"):
        loader = DataLoader(Data(), num_workers=1, multiprocessing_context=method)
        assert os.getpid() not in torch.cat(list(loader)).tolist()
    print("children", flush=True)
    torch.multiprocessing.spawn(work)
    import threading  # a queue's thread that ends with Python may leave a semaphore registered
    for thread in threading.enumerate()[1:]: thread.join(10)
"""


# Prints whether the loader of the slow worker made few batches; then resumes a loader of torchdata's, if there is one.
BALANCES = """
import importlib.util, time, torch, warnings
from torch.utils.data import DataLoader, Dataset, get_worker_info
class Data(Dataset):
    def __len__(self): return 24
    def __getitem__(self, i):
        worker = get_worker_info().id
        time.sleep(0.002 if worker else 0.5)  # on a busy machine a sample of the other one takes longer, too
        return i, worker, torch.zeros(4096)
made = [(int(i), int(worker)) for i, worker, _ in DataLoader(Data(), num_workers=2)]
assert [i for i, _ in made] == list(range(24))
print(sum(worker == 0 for _, worker in made) < 9, flush=True)
if importlib.util.find_spec("torchdata"):
    warnings.simplefilter("ignore")  # torchdata's
    from torchdata.stateful_dataloader import StatefulDataLoader
    loader = StatefulDataLoader([torch.full((4096,), float(i)) for i in range(8)], batch_size=2, num_workers=2)
    first = next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert [int(batch[0, 0]) for batch in loader] == [2, 4, 6]
    assert type(loader._iterator).__module__ == "numapin.data.stateful"
"""


class TestTakingOver:
    """When and where `install` is called."""

    def test_processes_of_every_kind(self, tmp_path: Path) -> None:
        """The hook does nothing while the script imports torch; it then installs once, for all loaders.

        Workers, forked or anew, start as usual and do not install it, because they iterate no loader; a process of
        torch.multiprocessing.spawn installs it itself, as ranks of one process do.
        """
        done = numapin(*RUN, "--dataloader=numapin", script(tmp_path, ITERATES))
        told = "numapin: dataloader: no process recorded a DataLoader\n"  # the stand-in for `install` records nothing
        assert (done.status, done.err) == (0, told)
        rank, _, others = done.out.partition("workers\n")
        assert rank.splitlines() == [
            "at start []",
            "loader ['numapin.data.install']",
            "installed",
            *("taken", "[[0, 1], [2, 3]]") * 2,
            "SourceFileLoader set()",
        ]
        workers, _, children = others.partition("children\n")
        assert (workers.split(), sorted(children.split())) == (["taken"] * 2, ["installed", "taken"])

    @pytest.mark.parametrize("choice", ["numapin", "numapin-balanced"])
    def test_both_choices(self, tmp_path: Path, choice: str) -> None:
        """With =numapin-balanced, torch's loaders give each batch to the worker that is ready first.

        Torchdata's loader uses the data path and keeps its state; a line says that its workers take turns.
        """
        done = numapin(*RUN, "--strict", f"--dataloader={choice}", script(tmp_path, BALANCES))
        is_balanced = choice == "numapin-balanced"
        assert (done.status, done.out) == (0, f"{is_balanced}\n"), done.err
        if find_spec("torchdata"):
            assert "numapin: dataloader: 2 loaders, 28 batches by numapin\n" in done.err
            assert done.err.count("balance=True changes nothing for") == is_balanced

    @pytest.mark.parametrize("options", [[], ["--dataloader", "torch"]], ids=["default", "torch"])
    def test_torch_is_the_default(self, tmp_path: Path, options: list[str]) -> None:
        """Without the option and with =torch nothing is installed, even inside a run that has it."""
        path = script(with_small_torch(tmp_path), STAND_IN + ITERATE)
        done = numapin(*RUN, *options, path, cwd=None, **hook_env.environment("numapin", {}))
        assert (done.status, done.out) == (0, ""), done.err

    @pytest.mark.parametrize(
        "command",
        [
            ["-m", "module_of_ours"],
            ["--no-python", sys.executable, "-u", "module_of_ours.py"],
            ["--no-python", "sh", "-c", f"{sys.executable} module_of_ours.py"],
            ["--run-path", "module_of_ours.py"],
        ],
        ids=["module", "no-python", "shell", "run-path"],
    )
    def test_however_the_script_is_started(self, tmp_path: Path, command: list[str]) -> None:
        """The hook works with -m, --no-python, --run-path, and a program that starts Python."""
        if "--run-path" not in command:  # which imports torch before the script
            with_small_torch(tmp_path)
        script(tmp_path, STAND_IN + ITERATE, "module_of_ours.py")
        done = numapin(*RUN, "--dataloader=numapin", *command, cwd=tmp_path)
        assert (done.status, done.out) == (0, "installed\ntaken\n"), done.err
        assert ("applies to the Python processes that sh starts" in done.err) == ("sh" in command)

    def test_what_a_rank_starts(self, tmp_path: Path) -> None:
        """A subprocess of a rank installs the hook too, unless its environment says NUMAPIN_DATALOADER=torch."""
        child = script(with_small_torch(tmp_path), STAND_IN + ITERATE, "child.py")
        text = (
            "import os, subprocess, sys\n"
            "for env in ({}, {'NUMAPIN_DATALOADER': 'torch'}):\n"
            f"    subprocess.run([sys.executable, {child!r}], check=True, env=os.environ | env)\n"
        )
        done = start("numapin", script(tmp_path, text), cwd=tmp_path)
        assert (done.status, done.out, done.err) == (0, "installed\ntaken\n", "")

    def test_threads(self, tmp_path: Path) -> None:
        """Threads that make their first iterators at the same time install once, and all get the new iterators."""
        text = (
            f"{STAND_IN}import threading, time\n"
            "from torch.utils.data import DataLoader\n"
            "quick = install\n"
            "def slow(): time.sleep(0.2); quick()\n"
            "sys.modules['numapin.data.install'].install = slow\n"
            "threads = [threading.Thread(target=lambda: list(DataLoader([1]))) for _ in range(4)]\n"
            "for act in ('start', 'join'): [getattr(thread, act)() for thread in threads]\n"
        )
        done = start("numapin", script(with_small_torch(tmp_path), text), cwd=tmp_path)
        assert (done.status, done.out.split(), done.err) == (0, ["installed"] + ["taken"] * 4, "")

    def test_subclasses(self, tmp_path: Path) -> None:
        """A subclass that makes its own iterators is left alone; one that calls torch's method gets the new ones."""
        text = (
            f"{STAND_IN}from torch.utils.data import DataLoader\n"
            "class Own(DataLoader):\n"
            "    def _get_iterator(self): return iter('ab')\n"
            "class Asking(DataLoader):\n"
            "    def _get_iterator(self): return super()._get_iterator()\n"
            "print(list(Own([1])), flush=True)\n"
            "print(len(list(Asking([1, 2]))))\n"
        )
        done = start("numapin", script(with_small_torch(tmp_path), text), cwd=tmp_path)
        assert (done.status, done.out.splitlines()) == (0, ["['a', 'b']", "installed", "taken", "2"]), done.err


BEFORE, BESIDE = "{0}/lib:lib::", "{0}/nowhere:{0}"
SITE = "print(__name__, __file__, __spec__.origin, flush=True)\nmark = 1\n"


@pytest.mark.parametrize(
    ("path", "text", "status"),
    [
        (None, SITE, 0),
        (BEFORE, SITE, 0),
        (BESIDE, SITE, 0),
        (BEFORE, "1 / 0", 0),
        (BEFORE, "import no_such_module", 0),
        (BEFORE, "raise ImportError('x', name='sitecustomize')", 0),
        (BESIDE, "import os; os.write(2, b'left'); os._exit(3)", 3),
    ],
)
def test_the_users_sitecustomize(tmp_path: Path, path: str | None, text: str, status: int) -> None:
    """The user's sitecustomize, wherever it is, is itself, and fails or exits as it does without the hook."""
    (tmp_path / "lib").mkdir()
    for where in (tmp_path, tmp_path / "lib"):
        script(where, text, "sitecustomize.py")
    changes = {} if path is None else {"PYTHONPATH": path.format(tmp_path)}
    ends = [start(choice, script(tmp_path, STATE), cwd=tmp_path, **changes) for choice in ("torch", "numapin")]
    assert ends[0] == ends[1]
    assert ends[0].status == status


class TestWhereItCannotWork:
    """Cases where the hook cannot work: the message, printed once, and the place."""

    @pytest.mark.parametrize("name", ["", "p\x1b[2Jy\u202e\nnumapin: forged"], ids=ascii)
    def test_interpreter_without_numapin(self, name: str, tmp_path: Path) -> None:
        """An interpreter without numapin reports that at its first iterator and keeps torch's loader."""
        program = BASE_PYTHON
        if name:
            program = str(tmp_path / name)
            Path(program).symlink_to(BASE_PYTHON)
        with_small_torch(tmp_path)
        code = "from torch.utils.data.dataloader import DataLoader as D; print(list(D('ab')), list(D('ab')))"
        done = start("numapin", "-c", code, cwd=tmp_path, program=program)
        assert (done.status, done.out) == (0, "['a', 'b'] ['a', 'b']\n")
        (line,) = done.err.splitlines()
        assert line.startswith(f"numapin: warning: {printable(program)} cannot import numapin (No module named")
        assert "torch's own DataLoader is used; hint: install numapin" in line

    @pytest.mark.parametrize("content", ["def __iter__(self): return iter('ab')", None])
    def test_torch_without_the_hooked_method(self, tmp_path: Path, content: str | None) -> None:
        """A torch whose loader is made differently is left as it is, with a warning."""
        with_small_torch(tmp_path, f"class DataLoader:\n    {content}\n" if content else "")
        code = "import torch.utils.data.dataloader as module; print(list(getattr(module, 'DataLoader', str)()))"
        done = start("numapin", "-c", code, cwd=tmp_path, program=BASE_PYTHON)
        assert (done.status, done.out) == (0, "['a', 'b']\n" if content else "[]\n"), done.err
        (line,) = done.err.splitlines()
        assert "cannot use numapin's DataLoader (this torch has no DataLoader._get_iterator)" in line
        assert "torch's own DataLoader is used; hint: use a version of numapin for" in line

    def test_refusing_interpreter(self, tmp_path: Path) -> None:
        """An option that disables the hook is reported before the start with the remedy; --strict makes it an error."""
        command = ("--no-python", sys.executable, "-I", script(tmp_path, "print('ran')"))
        done = numapin(*RUN, "--dataloader=numapin", *command)
        assert (done.status, done.out) == (0, "ran\n"), done.err
        (line,) = (line for line in done.err.splitlines() if "--dataloader" in line)
        assert f"--dataloader numapin cannot work: {sys.executable} -I ignores PYTHONPATH" in line
        assert "from numapin.data.install import install; install()" in line
        done = numapin(*RUN, "--dataloader=numapin", "--strict", *command)
        assert (done.status, done.out) == (5, "")
        assert f"--strict: --dataloader numapin cannot work: {sys.executable} -I " in done.err


# Rank 0 has a loader of each kind, and one CPU; rank 1 has none, and torch without what it does not use.
EVERY_KIND = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
if os.environ["RANK"] == "1":
    sys.path.insert(0, sys.argv[1])
    from torch.utils.data import DataLoader
    sys.exit()
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
class Data(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return torch.full((4096,), float(i))
class Own(DataLoader):
    def _get_iterator(self): return _SingleProcessDataLoaderIter(self)
class Sparse(Data):
    def __getitem__(self, i): return torch.eye(2).to_sparse()
assert len(list(Own(Data()))) == 6
train, validate = (DataLoader(Data(), batch_size=2, num_workers=n) for n in (2, 0))
for epoch in range(2):
    for batch in train: pass
    for batch in validate: pass
for batch in DataLoader(Data(), batch_size=2): pass
for batch in DataLoader(Sparse(), num_workers=1, collate_fn=list): pass
"""

# First a failure after 2 batches, then at the restart 3 batches and death by SIGKILL.
FAILING = """
import os, signal, torch
from torch.utils.data import DataLoader
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
batches = iter(DataLoader([torch.zeros(4096)] * 5, num_workers=1))
for n in range(2 if is_first else 3): next(batches)
if is_first: raise SystemExit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestAtTheEnd:
    """The line at the end of a run says which loaders used numapin's path, and --strict requires that all did."""

    def test_every_kind_of_loader(self, tmp_path: Path) -> None:
        """One line for two ranks: what took the path, and each reason and place of what did not; status 5."""
        path = script(tmp_path, EVERY_KIND)
        (tmp_path / "small").mkdir()
        small = str(with_small_torch(tmp_path / "small"))
        done = numapin("run", "--nproc-per-node", "2", "--quiet", "--strict", "--dataloader=numapin", path, small)
        assert done.status == 5, done.err
        (line,) = re.findall("^numapin: dataloader: .*$", done.err, re.MULTILINE)
        assert line == (
            "numapin: dataloader: 2 loaders, 12 batches by numapin; 3 loaders not: 1 Own makes its own iterators "
            "(train.py:15), 1 num_workers=0 (train.py:22), 1 num_workers=0 (train.py:23); 6 batches outside the slots: "
            "a tensor that only torch can send; rank 1 left no record of a loader"
        )
        assert "--strict: --dataloader numapin did not reach every batch: 2 loaders" in done.err
        assert done.err.count("numapin: torch's DataLoader uses numapin's data path\n") == 1
        places = re.findall(r"^(\S+): UserWarning: This DataLoader will create", done.err, re.MULTILINE)
        assert f"{path}:21" in places
        assert [place for place in places if "numapin" in Path(place).parts[-3:]] == []
        assert "sitecustomize" not in done.err

    def test_a_job_that_fails(self, tmp_path: Path) -> None:
        """Counts add up over restarts, even of a rank that exits; a line says that a killed rank's are missing."""
        done = numapin(*RUN, "--max-restarts=1", "--strict", "--dataloader=numapin", script(tmp_path, FAILING))
        assert done.status == 1, done.err
        expected = "2 loaders, at least 2 batches by numapin; the last counts of rank 0 are missing: it ended without"
        assert f"numapin: dataloader: {expected} Python's exit handlers (killed, or os._exit)\n" in done.err

    def test_without_a_loader(self, tmp_path: Path) -> None:
        """A script without a loader is reported, and --strict refuses it."""
        done = numapin(*RUN, "--strict", "--dataloader=numapin", script(tmp_path, "print('ran')"))
        assert (done.status, done.out) == (5, "ran\n")
        assert "numapin: dataloader: no process recorded a DataLoader\n" in done.err

    def test_names_the_host_of_several(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """In a job of several hosts each launcher reports its own host's loaders, and says whose they are."""
        handover.write_json(str(tmp_path), "observed-0-0.json", {"rank": 0})
        job, options = SimpleNamespace(is_single_host=False), SimpleNamespace(dataloader="numapin", strict=False)
        with _loaders_reported(str(tmp_path), job, options):  # type: ignore[arg-type]
            pass
        said = f"numapin: dataloader on {os.uname().nodename}: no process recorded a DataLoader\n"
        assert capsys.readouterr().err == said


def test_dry_run_shows_the_environment(tmp_path: Path) -> None:
    """--dry-run prints the environment of each rank in shell syntax."""
    path = script(tmp_path, "import json, os; print(json.dumps(os.environ.get('PYTHONPATH')))")
    done = numapin(*RUN, "--dataloader=numapin", "--dry-run", path, PYTHONPATH="a b")
    assert done.status == 0, done.err
    line = done.out.partition("rank 0: ")[2]
    assert "NUMAPIN_DATALOADER=numapin" in line
    expected = hook_env.environment("numapin", {"PYTHONPATH": "a b"})["PYTHONPATH"]
    assert json.loads(call("sh", "-c", line).out) == expected
