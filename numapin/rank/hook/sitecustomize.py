"""Start numapin's hook in an interpreter, and import the sitecustomize that this file hides.

Every Python of a rank, below its wrapper (bash, env, uv run) or below `numapin exec --children` may run this, of any
version: Python 2.7 must be able to read it, and one that is too old for the hook starts as it would without it.

Python imports only the first `sitecustomize` on its path. So this one removes its folder from the path and imports the
name again. Errors of that module, or ModuleNotFoundError if there is none, reach `site` as they would without us.

- NUMAPIN_RANK_PID, from a rank's shim: `numapin_hook_errors` records what ends the program, and the steps of its
  loops are published. Children do not inherit this variable. A Python that has left the rank's session, e.g. a daemon,
  records nothing.
- The variables of the other parts, `numapin_hook_parts`: children inherit them, so the folder stays on PYTHONPATH.
"""

import os
import sys

_PARTS = ("NUMAPIN_DATALOADER", "NUMAPIN_TRACE", "NUMAPIN_STEPS", "NUMAPIN_CHILDREN")


def _start():  # noqa: ANN202 - Python 2.7
    # type: () -> None
    """Start what the variables ask for; leave the path as it would be without this, and PYTHONPATH if no part stays."""
    folder = os.path.dirname(os.path.abspath(__file__))
    file, rank = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.pop("NUMAPIN_RANK_PID", None)
    has_parts, start = any(map(os.environ.get, _PARTS)), None
    is_rank = bool(file) and rank == str(os.getsid(0))
    try:
        if is_rank and sys.version_info >= (3, 8):
            __import__("numapin_hook_errors").watch(file, folder)
            del sys.modules["numapin_hook_errors"]
        if (has_parts or is_rank) and sys.version_info >= (3, 8):
            start = __import__("numapin_hook_parts").start
            del sys.modules["numapin_hook_parts"]
    except Exception:  # the program must start, and the next `sitecustomize` be imported
        pass
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == folder and not has_parts:
        del os.environ["PYTHONPATH"]
        if rest:
            os.environ["PYTHONPATH"] = rest
    if start is not None:
        start(is_rank=is_rank)
    this = sys.modules.pop(__name__)  # Python 2 clears a module without references
    __import__(this.__name__)


if __name__ == "sitecustomize":
    _start()
