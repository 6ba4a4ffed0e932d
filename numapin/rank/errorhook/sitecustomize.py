"""Bring numapin_recorder into a rank's interpreter, and leave no trace of it in the environment and the path. Edge.

Comes in: an interpreter that starts with this file's folder first on PYTHONPATH, and with NUMAPIN_RANK_PID. A rank has
both, and so has each Python below its wrapper (bash, env, uv run), which may be of any version: this must parse as
Python 2.7. Children of such a Python inherit neither. One that has left the rank's session, e.g. a daemon, records
nothing.

Python imports only the first `sitecustomize` on its path, so this one imports the name again once its folder is off the
path, as `launcher/sitehook` does.
"""

import os
import sys


def _start():  # noqa: ANN202 - Python 2.7
    # type: () -> None
    """Watch what ends a rank; then leave the path and the environment as they would be without this."""
    folder = os.path.dirname(__file__)
    file, rank = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.pop("NUMAPIN_RANK_PID", None)
    try:
        if file and rank == str(os.getsid(0)) and sys.version_info >= (3, 8):
            import numapin_recorder  # type: ignore[import-not-found]

            del sys.modules["numapin_recorder"]
            numapin_recorder.watch(file, folder)
    except Exception:  # the program must start, and the next `sitecustomize` be imported
        pass
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == folder and rest:
        os.environ["PYTHONPATH"] = rest
    elif first == folder:
        del os.environ["PYTHONPATH"]
    this = sys.modules.pop(__name__)  # Python 2 clears a module without references
    __import__(this.__name__)


if __name__ == "sitecustomize":
    _start()
