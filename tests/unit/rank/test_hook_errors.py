"""The record of the exception that ends a rank's interpreter: its time, its text, and that the program sees nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.rank.seam import HOOK

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = "error.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank's interpreter that has ended: its exit status, its stderr, and what it recorded."""

    status: int
    err: str
    record: dict[str, Any] | None

    @property
    def text(self) -> str:
        """The recorded traceback."""
        assert self.record is not None
        return str(self.record["extraInfo"]["py_callstack"])

    @property
    def time_s(self) -> float:
        """The recorded time."""
        assert self.record is not None
        return float(self.record["extraInfo"]["time_s"])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Return a function that runs a script as a rank does; other arguments are the texts of files beside it."""

    def run(text: str, **beside: str) -> Ended:
        for name, content in {"train": text, **beside}.items():
            (tmp_path / f"{name}.py").write_text(content)
        done = _started([sys.executable, "train.py"], tmp_path, PYTHONPATH=HOOK, TORCHELASTIC_ERROR_FILE=FILE)
        file = tmp_path / FILE
        record = json.loads(file.read_text())["message"] if file.exists() else None
        assert list(tmp_path.glob(f"{FILE}.*")) == []
        return Ended(status=done.returncode, err=done.stderr, record=record)

    return run


def _started(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {
        name: value for name, value in os.environ.items() if name not in ("TORCHELASTIC_ERROR_FILE", "PYTHONPATH")
    }
    return subprocess.run(
        ["sh", "-c", 'NUMAPIN_RANK_PID=$$ exec "$@"', "sh", *command],
        cwd=folder,
        env={**environ, "PYTHONIOENCODING": "utf-8:backslashreplace", **variables},
        capture_output=True,
        text=True,
        start_new_session=True,  # as each rank
        check=False,
        timeout=60,
    )


def test_the_time_is_that_of_the_exception(run: Callable[..., Ended]) -> None:
    """Functions of atexit, which may take long, run after the record has been written."""
    before_s = time.time()
    done = run(
        "import atexit, os, sys, time\n"
        "def at_exit(): print(os.path.exists('error.json'), file=sys.stderr); time.sleep(0.5)\n"
        "atexit.register(at_exit)\n"
        "raise ValueError(7)\n"
    )
    assert before_s < done.time_s < time.time() - 0.5
    assert done.err == f"{done.text}True\n"


def test_a_hook_that_calls_the_former(run: Callable[..., Ended]) -> None:
    """The record does not wait for what a program's own hook does."""
    done = run(
        "import os, sys\n"
        "former = sys.excepthook\n"
        "def hook(*error): former(*error); print(os.path.exists('error.json'), file=sys.stderr)\n"
        "sys.excepthook = hook\n"
        "raise ValueError(7)\n"
    )
    assert done.err == f"{done.text}True\n"


def test_a_hook_that_does_not(run: Callable[..., Ended]) -> None:
    """The exception is recorded at the end."""
    done = run(
        "import os, sys\nsys.excepthook = lambda *_: print(os.path.exists('error.json'), file=sys.stderr)\n1 / 0\n"
    )
    assert (done.status, done.err) == (1, "False\n")
    assert "ZeroDivisionError" in done.text


HANDLED = {
    "interactive": "import code\ncode.InteractiveInterpreter().runsource('1 / 0')\n",
    "by the program": "import sys\ntry: 1 / 0\nexcept Exception: sys.excepthook(*sys.exc_info())\n",
    "by the C interface": "import ctypes\nctypes.pythonapi.PyRun_SimpleString(b'1 / 0')\n",
    "in a thread": "import sys, threading\n"
    "def work():\n    try: 1 / 0\n    except Exception: sys.excepthook(*sys.exc_info())\n"
    "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\n",
    "in a thread of its own": "import _thread, time\n_thread.start_new_thread(lambda: 1 / 0, ())\ntime.sleep(0.2)\n",
}


@pytest.mark.parametrize("text", HANDLED.values(), ids=HANDLED)
def test_errors_that_do_not_end_the_program(run: Callable[..., Ended], text: str) -> None:
    """What a program has survived is not the reason for its exit status."""
    done = run(f"{text}import sys\nsys.exit(3)\n")
    assert done.status == 3
    assert "Error" in done.err
    assert done.record is None


@pytest.mark.parametrize("text", ["ValueError('x' * 200_000)", "ValueError('x\\n' * 100_000)"], ids=["word", "lines"])
def test_a_long_message_leaves_the_frames(run: Callable[..., Ended], text: str) -> None:
    """The beginning and the end of a message stay, and all frames."""
    done = run(f"def step():\n    raise {text}\nstep()\n")
    first = 'Traceback (most recent call last):\n  File "'
    assert done.text.startswith(first)
    assert "line 3, in <module>\n    step()\n" in done.text
    assert "line 2, in step\n" in done.text
    assert "ValueError: x" in done.text
    assert "characters left out]" in done.text
    assert len(done.text) < 1 << 16


def test_many_frames_leave_the_first_and_the_last(run: Callable[..., Ended]) -> None:
    """Frames in the middle are left out, and their number is recorded."""
    calls = "".join(f"def f{n}():\n    f{n + 1}()\n" for n in range(900))
    done = run(f"import sys\nsys.setrecursionlimit(9999)\n{calls}def f900():\n    raise ValueError('end')\nf0()\n")
    assert "in <module>\n    f0()\n" in done.text
    assert done.text.endswith("in f900\n    raise ValueError('end')\nValueError: end\n")
    assert " entries left out]\n" in done.text
    assert len(done.text) < (1 << 16) + 100


def test_modules_beside_the_script(run: Callable[..., Ended]) -> None:
    """A program's own json, traceback or token is not imported, and the traceback is Python's."""
    names = ("json", "time", "token", "linecache", "re", "codecs", "contextlib", "collections")
    done = run("raise ValueError('é\\ud800\\U0001f600\"\\\\\\x1b\\n')\n", **dict.fromkeys(names, "print('imported')\n"))
    assert done.record is not None
    assert done.record["message"] == 'ValueError: é\ud800\U0001f600"\\\x1b'
    assert 'File "' in done.text
    if sys.version_info < (3, 13):  # newer ones print with the traceback module, which imports the script's linecache
        assert "in <module>\n    raise ValueError(" in done.text
    assert "imported" not in done.text


@pytest.mark.parametrize("beside", [{"traceback": "", "token": ""}, {"enum": "class Enum: pass\n"}], ids=str)
def test_modules_that_the_script_has_imported(run: Callable[..., Ended], beside: dict[str, str]) -> None:
    """If they hide or break what Python's traceback needs, the frames are recorded without the source."""
    done = run(f"import {', '.join(beside)}\nraise ValueError(7)\n", **beside)
    assert done.text.endswith('train.py", line 2, in <module>\nValueError: 7\n')


REPLACED = {
    "threads": "import _thread\n_thread.get_ident = lambda: 7\n",
    "time": "import time\ntime.time = lambda: 1.0\n",
    "text": "class Error(ValueError):\n    def __str__(self): raise KeyError\nValueError = Error\n",
}


@pytest.mark.parametrize("text", REPLACED.values(), ids=REPLACED)
def test_functions_that_a_program_replaces(run: Callable[..., Ended], text: str) -> None:
    """Libraries like gevent and freezegun replace functions; an exception of the program's may have no text."""
    before_s = time.time()
    done = run(f"{text}raise ValueError(7)\n")
    assert done.time_s > before_s
    assert "in <module>" in done.text


def test_an_entry_of_the_path_that_is_no_text(tmp_path: Path) -> None:
    """The program's own sitecustomize is imported, and the exception is recorded."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('own')\n")
    text = f"import pathlib, sys\nsys.path.insert(0, pathlib.Path('x'))\nsys.path.append({str(tmp_path / 'site')!r})\n"
    start = f"sys.path.insert(0, {HOOK!r})\nsys.modules.pop('sitecustomize', None)\nimport sitecustomize\n"
    done = _started([sys.executable, "-c", f"{text}{start}1 / 0"], tmp_path, TORCHELASTIC_ERROR_FILE=FILE)
    assert done.stdout == "own\n"
    assert "ZeroDivisionError" in (tmp_path / FILE).read_text(), done.stderr


def test_a_huge_message_takes_no_more_memory(run: Callable[..., Ended]) -> None:
    """Python's own traceback would hold many copies of it."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (700 << 20,) * 2)\n"
    done = run(
        f"{limit}text = 'x\\n' * (50 << 20)\nimport sys\nsys.stderr = open('/dev/null', 'w')\nraise ValueError(text)\n"
    )
    assert "characters left out]" in done.text


def test_a_very_deep_traceback(run: Callable[..., Ended]) -> None:
    """The last frames are recorded, without minutes of work."""
    again = "for _ in range(100_000):\n    try: raise error\n    except ValueError: pass\n"
    text = f"error = ValueError('end')\n{again}raise error\n"
    began = os.times()
    assert run(text).text.endswith("ValueError: end\n")
    assert os.times().children_user - began.children_user < 5


UNCHANGED = """
import os, sys
names = sorted({*sys.modules} - {"__future__", "atexit", "faulthandler"})
entries = (sys.path[1:], os.environ.get("PYTHONPATH"))
print(sys.excepthook is sys.__excepthook__, hasattr(sys, "last_value"), entries, names, file=sys.stderr)
1 / 0
"""


def test_a_signal_handler_that_raises_while_it_is_recorded(run: Callable[..., Ended]) -> None:
    """As torch's does when a DataLoader worker has died: the exception is recorded all the same."""
    done = run("""
import os, signal
def handler(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise RuntimeError("a worker was killed")
def rename(*names, first=os.rename):
    os.kill(os.getpid(), signal.SIGCHLD)
    first(*names)
os.rename = rename
signal.signal(signal.SIGCHLD, handler)
raise EOFError("the connection")
""")
    assert done.record is not None
    assert done.record["message"] == "EOFError: the connection"


def test_the_program_sees_nothing(run: Callable[..., Ended], tmp_path: Path) -> None:
    """Hooks are equal as without it, nothing but small modules is imported, and the traceback is the same."""
    done = run(UNCHANGED)
    plain = _started([sys.executable, "train.py"], tmp_path)
    assert done.record is not None
    assert (done.status, done.err) == (plain.returncode, plain.stderr)


def test_cost() -> None:
    """Nothing but built-in modules and __future__ is imported at a rank's start."""
    command = [sys.executable, "-X", "importtime", "-c", ""]
    found = []
    for path in (HOOK, ""):
        done = _started(command, Path("/"), PYTHONPATH=path, TORCHELASTIC_ERROR_FILE="/nonexistent/file")
        found.append({line.rpartition("|")[2].strip() for line in done.stderr.splitlines()})
    ours = {"numapin_hook_errors", "numapin_hook_parts"}
    assert ours < found[0] - found[1] <= {"__future__", "atexit", "faulthandler", "sitecustomize", *ours}


def test_the_text_of_sys_exit(run: Callable[..., Ended]) -> None:
    """It is recorded with the frames that lead to sys.exit, and is printed once, as without the record."""
    done = run("import sys\ndef leave(): sys.exit('no data')\nleave()\n")
    assert done.record is not None
    assert (done.status, done.err, done.record["message"]) == (1, "no data\n", "SystemExit: no data")
    frames = [line.rpartition("train.py")[2] for line in done.text.split("\n") if line.startswith("  File")]
    assert frames == ['", line 3, in <module>', '", line 2, in leave']


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("try: sys.exit('no data')\nexcept SystemExit: pass\nsys.exit(1)\n", 1),
        ("try: sys.exit('no data')\nexcept SystemExit as error: print(error, file=sys.stderr)\n", 0),
        ("sys.exit()\n", 0),
        ("sys.exit(None)\n", 0),
        ("sys.exit(True)\n", 1),
        ("sys.stderr = None\nsys.exit('no data')\n", 1),
        ("import os\nif os.fork() == 0: sys.exit('the child')\nos.wait()\n", 0),
    ],
)
def test_no_text_of_sys_exit(run: Callable[..., Ended], text: str, status: int) -> None:
    """Nothing is recorded if the text has not ended the program, and the status is as without the record."""
    done = run(f"import sys\n{text}")
    assert (done.status, done.record) == (status, None)


def test_the_folder_stays_for_other_parts(tmp_path: Path) -> None:
    """Children inherit the variables of other parts, so PYTHONPATH keeps the folder, once, also after exec."""
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "if len(sys.argv) < 2: os.execv(sys.executable, [sys.executable, 'train.py', 'again'])\n"
        "print(os.environ['PYTHONPATH'], file=sys.stderr)\n"
        "1 / 0\n"
    )
    given = {"PYTHONPATH": f"{HOOK}:/x", "TORCHELASTIC_ERROR_FILE": FILE, "NUMAPIN_DATALOADER": "numapin"}
    done = _started([sys.executable, "train.py"], tmp_path, **given)
    assert done.stderr.startswith(f"{HOOK}:/x\n")
    assert "ZeroDivisionError" in (tmp_path / FILE).read_text()
