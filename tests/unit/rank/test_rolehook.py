"""The CPUs of roles in a rank's interpreter: OpenMP's threads, DataLoader workers, children, and what is left alone.

Two CPUs are enough: the main thread has one of them, and one role the other. Where one operator is enough, torch is a
stand-in that has torch's OpenMP start threads: it is imported in 0.02 s instead of 1.4 s.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from numapin.rank.roles import HOOK, ROLES, hand_roles
from tests.integration.launching import WITHOUT_COMPILER

CPUS = sorted(os.sched_getaffinity(0))
MAIN, OTHER = CPUS[0], CPUS[-1]
LOOK = """
import json, os
def masks():
    found = {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
    main = found.pop(os.getpid())
    return [main, sorted(found.values())]
"""
WORK = "torch.ones(1 << 18).add_(1)"  # enough elements for several threads
STAND_IN = """
import ctypes
openmp = ctypes.CDLL({path!r}, ctypes.RTLD_GLOBAL)
nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
def operator():
    openmp.GOMP_parallel(nothing, None, 0, 0)
"""

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def _openmp() -> str:
    """Return the path of torch's OpenMP."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    return str(
        next(path for place in ("torch/lib", "torch.libs") for path in folder.parent.glob(f"{place}/libgomp*.so*"))
    )


def _stand_in(folder: Path) -> None:
    """Write the stand-in for torch into a folder."""
    (folder / "torch.py").write_text(STAND_IN.format(path=_openmp()))


def _run(script: str, folder: Path, *options: str, roles: str, main: int = MAIN, **environ: str) -> tuple[Any, str]:
    """Run a script as a rank's program; return the JSON of its last line, and its stderr."""
    (folder / "train.py").write_text(LOOK + script)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "NUMAPIN_"))}
    variables = {**inherited, "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore::DeprecationWarning", **environ}
    hand_roles(roles, variables)
    done = subprocess.run(
        ["taskset", "--cpu-list", str(main), sys.executable, *options, "train.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


OPTIMIZER = f"main={MAIN} optimizer={OTHER}"
LOADER = f"main={MAIN} loader={OTHER}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run one program through all steps with OpenMP's threads. Its torch is the real one, its child's the stand-in."""
    folder = tmp_path_factory.mktemp("openmp")
    (folder / "child").mkdir()
    _stand_in(folder / "child")
    found, err = _run(
        f"""
import subprocess, sys, threading
before = masks()
import torch
steps = {{"before": before, "import": masks()}}
{WORK}
steps["first"] = masks()
torch.set_num_threads(3)
{WORK}
steps["more"] = masks()
torch.set_num_threads(1)
{WORK}
torch.set_num_threads(2)
{WORK}
steps["again"] = masks()
def work():
    {WORK}
    steps["thread"] = sorted(os.sched_getaffinity(0))
thread = threading.Thread(target=work)
thread.start()
thread.join()
pid = os.fork()
if pid == 0:
    torch.ones(8).add_(1)
    os._exit(0 if masks() == [[{MAIN}], []] else 1)
steps["fork"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
steps["variables"] = [name for name in os.environ if name.startswith(("OMP_P", "GOMP"))]
steps["path"] = [entry for entry in sys.path if "rolehook" in entry]
child = "import sys; sys.path.insert(0, 'child'); from train_look import masks; import json, torch; torch.operator()"
open("child/train_look.py", "w").write({LOOK!r})
child += "; print(json.dumps(masks()))"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
steps["child"] = json.loads(done.stdout or "[]") or done.stderr
print(json.dumps(steps))
""",
        folder,
        roles=OPTIMIZER,
    )
    assert err == ""
    assert isinstance(found, dict)
    return found


@pytest.mark.xdist_group("rolehook")
class TestOpenMp:
    """The threads of torch's CPU operators."""

    def test_they_start_on_the_optimizers_cpus(self, found: dict[str, Any]) -> None:
        """The import starts no thread; the first operator's threads are the optimizer's; the main thread stays."""
        assert found["before"] == found["import"] == [[MAIN], []]
        assert found["first"] == [[MAIN], [[OTHER]]]

    def test_threads_that_are_added_later(self, found: dict[str, Any]) -> None:
        """torch.set_num_threads adds threads there, also after it had taken some away.

        It starts a second pool, for quantized operators, which stays with the main thread.
        """
        assert found["more"][1].count([OTHER]) == 2
        assert found["again"][1].count([OTHER]) >= 1  # the kernel may still list those that were taken away
        assert found["more"][0] == found["again"][0] == [MAIN]

    def test_other_threads_stay_with_the_main_thread(self, found: dict[str, Any]) -> None:
        """A thread of the program that runs operators keeps the main thread's CPUs."""
        assert found["thread"] == [MAIN]

    def test_a_forked_child_has_the_main_threads_cpus(self, found: dict[str, Any]) -> None:
        """It has no other thread, and runs operators."""
        assert found["fork"] == 0

    def test_a_child_that_imports_torch(self, found: dict[str, Any]) -> None:
        """Its threads are placed as the rank's are."""
        assert found["child"] == [[MAIN], [[OTHER]]]

    def test_no_trace_is_left(self, found: dict[str, Any]) -> None:
        """Variables of OpenMP and the entry of sys.path are gone."""
        assert (found["variables"], found["path"]) == ([], [])

    def test_a_program_that_places_itself(self, tmp_path: Path) -> None:
        """A program that has moved its main thread, or whose user places OpenMP's threads, is left alone."""
        _stand_in(tmp_path)
        script = "import torch\ntorch.operator()\nprint(json.dumps(masks()))"
        moved = f"os.sched_setaffinity(0, {{{OTHER}}})\n{script}"
        assert _run(moved, tmp_path, roles=OPTIMIZER)[0] == [[OTHER], [[OTHER]]]
        assert _run(script, tmp_path, roles=OPTIMIZER, OMP_PROC_BIND="false")[0] == [[MAIN], [[MAIN]]]

    def test_openmp_that_was_loaded_before_torch(self, tmp_path: Path) -> None:
        """Its threads stay with the main thread, and one line says so."""
        _stand_in(tmp_path)
        script = f"""
import ctypes
ctypes.CDLL({_openmp()!r}, ctypes.RTLD_GLOBAL)
import torch
torch.operator()
print(json.dumps(masks()))"""
        found, err = _run(script, tmp_path, roles=OPTIMIZER)
        main, others = found
        assert main == [MAIN]
        assert others
        assert all(cpus == [MAIN] for cpus in others)
        assert err.count("numapin: warning: --cores-for: OpenMP was loaded before torch") == 1

    def test_a_failed_import_changes_nothing(self, tmp_path: Path) -> None:
        """If torch cannot be imported, the error is the program's, and mask and variables are as before."""
        (tmp_path / "torch.py").write_text("raise ImportError('broken')")
        script = """
try:
    import torch
except ImportError as error:
    print(json.dumps([str(error), masks(), "OMP_PLACES" in os.environ]))"""
        assert _run(script, tmp_path, roles=OPTIMIZER)[0] == ["broken", [[MAIN], []], False]


class TestWorkers:
    """The workers of torch's DataLoader and of numapin's."""

    def test_every_way_to_start_them(self, tmp_path: Path) -> None:
        """Forked and persistent workers, in the second epoch too, and spawned ones run on the loader's CPUs."""
        script = f"""{WITHOUT_COMPILER}
from torch.utils.data import DataLoader, Dataset
class Masks(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return json.dumps([masks()[0], len(os.sched_getaffinity(0))])
if __name__ == "__main__":
    import torch
    {WORK}
    found = {{}}
    for context, persistent, number in (("fork", False, 2), ("fork", True, 2), ("spawn", False, 1)):
        loader = DataLoader(
            Masks(), num_workers=number, multiprocessing_context=context, persistent_workers=persistent
        )
        found[context + str(persistent)] = sorted({{text for _ in range(number) for (text,) in loader}})
    found["main"] = masks()[0]
    print(json.dumps(found))
"""
        found, err = _run(script, tmp_path, roles=LOADER)
        there = [json.dumps([[OTHER], 1])]
        assert found == {"forkFalse": there, "forkTrue": there, "spawnFalse": there, "main": [MAIN]}
        assert "numapin: warning" not in err  # torch's own: 2.9 compares the workers with the main thread's CPUs


class TestEnvironment:
    """What is handed to the program."""

    @pytest.mark.parametrize(
        ("roles", "before", "after"),
        [
            ("main=0", {}, {ROLES: "main=0", "PYTHONPATH": HOOK}),
            ("main=0", {"PYTHONPATH": "/a:/b"}, {ROLES: "main=0", "PYTHONPATH": f"{HOOK}:/a:/b"}),
            ("main=0", {ROLES: "main=1", "PYTHONPATH": f"/a:{HOOK}"}, {ROLES: "main=0", "PYTHONPATH": f"{HOOK}:/a"}),
            ("", {ROLES: "main=1", "PYTHONPATH": f"{HOOK}:/a"}, {"PYTHONPATH": "/a"}),
            ("", {ROLES: "main=1", "PYTHONPATH": HOOK}, {}),
            ("", {"PYTHONPATH": "/a"}, {"PYTHONPATH": "/a"}),
            ("", {}, {}),
        ],
    )
    def test_hand_roles(self, roles: str, before: dict[str, str], after: dict[str, str]) -> None:
        """Roles of an outer rank are replaced or removed; other entries of PYTHONPATH stay."""
        hand_roles(roles, before)
        assert before == after

    @pytest.mark.parametrize("roles", ["nonsense", "main=x loader=y", "main=0-"])
    def test_a_variable_that_is_not_ours(self, roles: str, tmp_path: Path) -> None:
        """The program starts as if there were none, and the sitecustomize behind ours is imported."""
        (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.seen = 1")
        found, err = _run("print(json.dumps(seen))", tmp_path, roles=roles, PYTHONPATH=str(tmp_path))
        assert (found, err) == (1, "")


def test_places_fit_into_a_variable() -> None:
    """Places are intervals; of CPUs that have none, the list has as many places as Linux lets into a variable."""
    hook = runpy.run_path(f"{HOOK}/numapin_role_hook.py")
    assert hook["_place"]({0, 1, 2, 8, 10, 11}) == "{0:3,8:1,10:2}"
    large = hook["_places"](set(range(128)), set(range(128, 1024)))
    assert large == ",".join(["{0:128}"] + ["{128:896}"] * 256)
    scattered = hook["_places"]({0}, set(range(1, 2048, 2)))
    assert 100_000 < len(scattered) < 128 << 10
    assert scattered.endswith(":1}")
