"""The record of the exception that ends a rank's interpreter: its time, its text, and that the program sees nothing.

Each program is named by a sentence. How it ends, and what it records, is in errors.txt; NUMAPIN_UPDATE_GOLDEN=1 records
that again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.recorded.screens import compare
from tests.unit.rank.seam import HOOK

FILE = "error.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    status: int
    err: str
    record: dict[str, Any] | None

    @property
    def text(self) -> str:
        assert self.record is not None
        return str(self.record["extraInfo"]["py_callstack"])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Return a function that runs a script as a rank does; other arguments are the texts of files beside it."""

    def run(text: str, **beside: str) -> Ended:
        file, before_s = tmp_path / FILE, time.time()
        file.unlink(missing_ok=True)
        for name, content in {"train": text, **beside}.items():
            (tmp_path / f"{name}.py").write_text(content)
        done = _started([sys.executable, "train.py"], tmp_path, PYTHONPATH=HOOK, TORCHELASTIC_ERROR_FILE=FILE)
        record = json.loads(file.read_text())["message"] if file.exists() else None
        for name in beside:
            (tmp_path / f"{name}.py").unlink()
        assert list(tmp_path.glob(f"{FILE}.*")) == []
        assert record is None or before_s < float(record["extraInfo"]["time_s"]) < time.time()
        return Ended(status=done.returncode, err=done.stderr, record=record)

    return run


def _started(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {
        name: value for name, value in os.environ.items() if name not in ("TORCHELASTIC_ERROR_FILE", "PYTHONPATH")
    }
    return subprocess.run(
        ["sh", "-c", 'NUMAPIN_RANK_PID=$$ exec "$@"', "sh", *command],
        cwd=folder,
        env={**environ, "PYTHONIOENCODING": "utf-8:backslashreplace", "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
        start_new_session=True,  # as each rank
        check=False,
        timeout=300,
    )


_SURVIVED = "import sys\nsys.exit(3)\n"
_LEAVES = "import sys\n"
_SIGNALLED = """
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
"""
PROGRAMS = {
    "a hook that calls the former does not delay the record": "import os, sys\n"
    "former = sys.excepthook\n"
    "def hook(*error): former(*error); print(os.path.exists('error.json'), file=sys.stderr)\n"
    "sys.excepthook = hook\n"
    "raise ValueError(7)\n",
    "a hook that does not leaves the record to the end": "import os, sys\n"
    "sys.excepthook = lambda *_: print(os.path.exists('error.json'), file=sys.stderr)\n"
    "raise ValueError(7)\n",
    "a torchrun that is the rank has written what its own rank raised": "import json, time\n"
    "class ChildFailedError(Exception): pass\n"
    "extra = {'py_callstack': 'what its rank raised\\n', 'time_s': time.time()}\n"
    "with open('error.json', 'w') as file: json.dump({'message': {'message': 'what', 'extraInfo': extra}}, file)\n"
    "raise ChildFailedError('a table')\n",
    # What a program has survived is not the reason for its exit status.
    "an error at a prompt": f"import code\ncode.InteractiveInterpreter().runsource('1 / 0')\n{_SURVIVED}",
    "an error that the program reports": "import sys\n"
    f"try: 1 / 0\nexcept Exception: sys.excepthook(*sys.exc_info())\n{_SURVIVED}",
    "an error that a thread reports": "import sys, threading\n"
    "def work():\n    try: 1 / 0\n    except Exception: sys.excepthook(*sys.exc_info())\n"
    f"thread = threading.Thread(target=work)\nthread.start()\nthread.join()\n{_SURVIVED}",
    "an error in a thread of its own": "import _thread, time\n"
    "runs = _thread.allocate_lock()\nruns.acquire()\ndef work(): runs.release(); 1 / 0\n"
    "_thread.start_new_thread(work, ())\nruns.acquire()\n"
    f"while _thread._count(): time.sleep(0.01)\n{_SURVIVED}",
    # As torch's does when a DataLoader worker has died.
    "a signal handler that raises while it is recorded": _SIGNALLED,
    # Libraries like gevent and freezegun replace functions.
    "threads that the program replaces": "import _thread\n_thread.get_ident = lambda: 7\nraise ValueError(7)\n",
    "time that the program replaces": "import time\ntime.time = lambda: 1.0\nraise ValueError(7)\n",
    "an exception without a text": "class Error(ValueError):\n    def __str__(self): raise KeyError\nraise Error\n",
    # Printed once, as without the record.
    "the text of sys.exit": "import sys\ndef leave(): sys.exit('no data')\nleave()\n",
    "a text of sys.exit that was caught": f"{_LEAVES}try: sys.exit('no data')\nexcept SystemExit: pass\nsys.exit(1)\n",
    "a text of sys.exit that was printed": f"{_LEAVES}"
    "try: sys.exit('no data')\nexcept SystemExit as error: print(error, file=sys.stderr)\n",
    "sys.exit()": f"{_LEAVES}sys.exit()\n",
    "sys.exit(None)": f"{_LEAVES}sys.exit(None)\n",
    "sys.exit(True)": f"{_LEAVES}sys.exit(True)\n",
    "a text of sys.exit without a stderr": f"{_LEAVES}sys.stderr = None\nsys.exit('no data')\n",
    "a text of sys.exit in a fork": f"{_LEAVES}import os\nif os.fork() == 0: sys.exit('the child')\nos.wait()\n",
}


def shown(done: Ended, folder: Path) -> str:
    """Return how a program ended and what it recorded, without what differs between versions of Python."""
    if done.record is None:
        words = sorted({*re.findall(r"\w+Error|no data|the child", done.err)})
        return f"  status {done.status}, nothing recorded, printed {words}\n"
    text = "".join(f"  | {line}\n" for line in done.text.splitlines() if set(line) - set(" ~^"))
    printed = done.err.replace(done.text, "<the traceback>\n")
    return f"  status {done.status}, {done.record['message']!r}, printed {printed!r}\n{text}".replace(f"{folder}/", "")


def test_records_are_the_recorded_ones(run: Callable[..., Ended], tmp_path: Path) -> None:
    """An exception is recorded if it has ended the program, with its traceback; the status is as without the record."""
    text = "".join(f"{title}\n{shown(run(program), tmp_path)}" for title, program in PROGRAMS.items())
    compare(text, str(Path(__file__).with_name("errors.txt")))


def test_the_record_comes_before_the_functions_of_atexit(run: Callable[..., Ended]) -> None:
    """Functions of atexit, which may take long, run after the record has been written."""
    done = run(
        "import atexit, os, sys\n"
        "atexit.register(lambda: print(os.path.exists('error.json'), file=sys.stderr))\n"
        "raise ValueError(7)\n"
    )
    assert done.err == f"{done.text}True\n"


CALLS = "".join(f"def f{n}():\n    f{n + 1}()\n" for n in range(900))


def test_a_long_record_is_cut_in_the_middle(run: Callable[..., Ended]) -> None:
    """The beginning and the end of a message, and the first and last frames stay; what is left out is counted."""
    done = run(
        f"import sys\nsys.setrecursionlimit(9999)\n{CALLS}def f900():\n    raise ValueError('x' * 200_000)\nf0()\n"
    )
    assert done.text.startswith('Traceback (most recent call last):\n  File "')
    parts = ("in <module>\n    f0()\n", "in f900\n    raise ValueError('x' * 200_000)\n", "ValueError: x", "  [")
    assert [part for part in parts if part not in done.text] == []
    assert len(done.text) < (1 << 16) + 100


def test_modules_beside_the_script(run: Callable[..., Ended]) -> None:
    """A program's own json or traceback is not imported; the message may have any characters."""
    names = ("json", "time", "traceback", "token", "linecache", "re", "codecs", "contextlib", "collections")
    done = run("raise ValueError('é\\ud800\\U0001f600\"\\\\\\x1b\\n')\n", **dict.fromkeys(names, "print('imported')\n"))
    assert done.record is not None
    assert done.record["message"] == 'ValueError: é\ud800\U0001f600"\\\x1b'
    assert "imported" not in done.text
    if sys.version_info < (3, 13):  # newer ones print with the traceback module, which imports the script's linecache
        assert "in <module>\n    raise ValueError(" in done.text


DEEP = """
error = ValueError('end')
for _ in range(100_000):
    try: raise error
    except ValueError: pass
raise error
"""


def test_a_deep_error_costs_little(run: Callable[..., Ended]) -> None:
    """All of its frames would take minutes of work."""
    assert run(DEEP).text.endswith("ValueError: end\n")


UNCHANGED = """
import os, sys
names = sorted({*sys.modules} - {"__future__", "atexit", "faulthandler"})
entries = (sys.path[1:], os.environ.get("PYTHONPATH"))
print(sys.excepthook is sys.__excepthook__, hasattr(sys, "last_value"), entries, names, file=sys.stderr)
1 / 0
"""


def test_the_program_sees_nothing(run: Callable[..., Ended], tmp_path: Path) -> None:
    """Hooks are equal as without it, nothing but small modules is imported, and the traceback is the same."""
    done = run(UNCHANGED)
    plain = _started([sys.executable, "train.py"], tmp_path)
    assert done.record is not None
    assert (done.status, done.err) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize("loader", ["", "numapin"])
def test_cost(loader: str) -> None:
    """Nothing but built-in modules and __future__ is imported at a rank's start."""
    command = [sys.executable, "-X", "importtime", "-c", ""]
    found = []
    for path in (HOOK, ""):
        given = {"PYTHONPATH": path, "TORCHELASTIC_ERROR_FILE": "/nonexistent/file", "NUMAPIN_DATALOADER": loader}
        done = _started(command, Path("/"), **given)
        found.append({line.rpartition("|")[2].strip() for line in done.stderr.splitlines()})
    ours = {"numapin_hook_errors", "numapin_hook_parts"}
    assert ours < found[0] - found[1] <= {"__future__", "atexit", "faulthandler", "sitecustomize", *ours}


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
