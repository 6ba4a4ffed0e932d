"""Start numapin's hook in an interpreter, and import the sitecustomize that this file hides. Edge.

Every Python of a rank, below its wrapper (bash, env, uv run) or below `numapin exec --children` may run this, of any
version: Python 2.7 must be able to read it, and one that is too old for the hook starts as it would without it.

Python imports only the first `sitecustomize` on its path. So this one removes its folder from the path and imports the
name again. Errors of that module, or ModuleNotFoundError if there is none, reach `site` as they would without us.

- NUMAPIN_RANK_PID, from a rank's shim: `numapin_hook_errors` records what ends the program. Children do not inherit
  this variable. A Python that has left the rank's session, e.g. a daemon, records nothing.
- The variables of the other parts, `numapin_hook_parts`: children inherit them, so the folder stays on PYTHONPATH.
"""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
_rank = os.environ.pop("NUMAPIN_RANK_PID", None)
_names = ("NUMAPIN_DATALOADER", "NUMAPIN_TRACE", "NUMAPIN_STEPS", "NUMAPIN_CHILDREN")
_has_parts = any(map(os.environ.get, _names))
_start = None
if sys.version_info >= (3, 8):
    try:
        if os.environ.get("TORCHELASTIC_ERROR_FILE") and _rank == str(os.getsid(0)):
            __import__("numapin_hook_errors").watch(os.environ["TORCHELASTIC_ERROR_FILE"], _folder)
            del sys.modules["numapin_hook_errors"]
        if _has_parts:
            _start = __import__("numapin_hook_parts").start
            del sys.modules["numapin_hook_parts"]
    except Exception:  # the program must start, and the next `sitecustomize` be imported
        pass
sys.path[:] = [entry for entry in sys.path if entry != _folder]
_first, _, _rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
if _first == _folder and not _has_parts:
    del os.environ["PYTHONPATH"]
    if _rest:
        os.environ["PYTHONPATH"] = _rest
if _start is not None:
    _start()
_self = sys.modules.pop(__name__)  # Python 2 clears a module to which nothing refers
__import__(__name__)
