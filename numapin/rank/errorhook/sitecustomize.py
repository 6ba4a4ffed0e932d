"""The record of an uncaught exception in a rank's interpreter. Edge.

Comes in: an interpreter that starts with this file's folder first on PYTHONPATH, and TORCHELASTIC_ERROR_FILE. Goes out:
the same interpreter, without a trace of this in its environment and its path. If an exception ends its program, that
file has it at the end, in the format of torch's @record, unless @record has written it already.

Nothing that the program prints changes, nor its exit status: when an exception has ended a program, Python keeps it in
`sys.last_value`, prints it, and then calls the functions of `atexit`; the one here is the last of them. It looks at
that value. `sys.excepthook` stays as it is, because programs and libraries compare and replace it.

Children do not inherit this. Python imports only the first `sitecustomize` on its path, so this one imports the name
again once its folder is off the path, as `launcher/sitehook` does. It uses no syntax newer than Python 3.8.
"""  # noqa: INP001 - this folder is on the path and not a package

from __future__ import annotations

import os
import sys

_FORMAT_CHARS = 1 << 16  # the end of a longer traceback is enough


def _start() -> None:
    """Leave the path and the environment as they would be without this; in a rank, note its exception at its end."""
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == folder and rest:
        os.environ["PYTHONPATH"] = rest
    elif first == folder:
        del os.environ["PYTHONPATH"]
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and os.getsid(0) == os.getpid():  # each rank leads a session; its children do not
        import atexit

        atexit.register(_record, file, os.getpid())
    del sys.modules[__name__]
    __import__(__name__)


def _record(file: str, rank: int) -> None:
    """Write the exception that has ended the program, if one has. Never raise, and never replace a file."""
    error = getattr(sys, "last_value", None)
    if error is None or os.getpid() != rank:  # a fork runs this, too
        return
    try:
        import json
        import time
        import traceback

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        now_s = time.time()
        extra = {"py_callstack": text[-_FORMAT_CHARS:], "timestamp": str(int(now_s)), "time_s": now_s}
        last = "".join(traceback.format_exception_only(type(error), error)).strip()
        if isinstance(error, SyntaxError):  # begins with the place
            last = type(error).__name__ + ": " + str(error)
        _write(file, json.dumps({"message": {"message": last[:_FORMAT_CHARS], "extraInfo": extra}}))
    except BaseException:  # noqa: BLE001, S110 - the program's own end must not change; nobody could handle it here
        pass


def _write(file: str, text: str) -> None:
    """Write a file as a whole, or not at all: torch's agent fails if it reads a part. Do not replace a file."""
    new = file + "." + str(os.getpid())
    try:
        with open(new, "x") as opened:
            opened.write(text)
        if not os.path.exists(file):
            os.rename(new, file)
    finally:
        if os.path.exists(new):
            os.unlink(new)


if __name__ == "sitecustomize":
    _start()
