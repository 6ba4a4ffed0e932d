"""The record of what ends a rank's interpreter: an uncaught exception, or the text of `sys.exit`.

While the program runs, a signal makes it write where it is into a file in memory, which the launcher reads when another
rank has failed.

Nothing that the program prints changes, nor its exit status. `sys.excepthook` and `sys.__excepthook__` are one function
here as well, because programs compare them; it records the exception and calls Python's own. If a program replaces the
hook by one that does not call the former, the exception is in `sys.last_value`, at which the last of the `atexit`
functions looks; the time is then that of Python's end.

It uses no syntax newer than Python 3.8. It does not import json, because a module beside the script may have that name.
"""

from __future__ import annotations

import os
import sys
from _signal import SIGRTMAX  # type: ignore[import-not-found]
from _thread import get_ident  # bound now: programs replace these functions in their modules
from time import time

TYPE_CHECKING = False  # importing typing's would cost each rank 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, ModuleType, TracebackType
    from typing import NoReturn

    Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_MOST_CHARS = 1 << 16  # of a traceback; of a longer one, the beginning and the end
_MOST_CHARS_OF_PART = 1 << 13  # of a frame, or of an exception's message
_MOST_FRAMES = 2000  # the last ones of each exception
_MOST_TRIES = 3  # a signal handler may raise meanwhile: torch's does when a DataLoader worker has died
# The outermost code of a script or a module that is still running:
_OUTERMOST_CODE = ("<module>", "_run_module_as_main")


def watch(file: str, folder: str) -> None:
    """Record what ends this process's program. `folder` is that of this file.

    A wrapper may start one Python after another. One that fails replaces the record of the one before: the wrapper went
    on after that. A record of torch's @record, which is of the same exception, is replaced by one with its exact time,
    but for that of a torchrun that is itself the rank: it is the error of its first rank.
    """
    import atexit
    import faulthandler

    rank, thread = os.getpid(), get_ident()
    is_recorded = False
    # The standard library's entries of the path; the script's folder is not there yet.
    beside = (os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload"))
    library = [entry for entry in sys.path if isinstance(entry, str) and (entry in beside or entry.endswith(".zip"))]

    def is_program() -> bool:
        return os.getpid() == rank and get_ident() == thread  # a fork has these hooks, too

    def record(error: BaseException) -> None:
        """Write the exception, once. Never raise."""
        nonlocal is_recorded
        is_torchruns = type(error).__name__ == "ChildFailedError" and os.path.exists(file)
        now_s = time()
        for _ in range(_MOST_TRIES):
            try:
                if not (is_recorded or is_torchruns):
                    _write(file, _text_of(error, now_s, library))
                    is_recorded = True
                break
            # A program must end in the same way, whatever goes wrong here: a signal handler raised, or the program has
            # a module with the name of one that this imports.
            except BaseException:
                pass

    # 1. An uncaught exception: both of Python's hooks record it.
    def recording(theirs: Hook) -> Hook:
        """Return a hook that records the exception and calls theirs."""

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if is_program() and _has_ended():
                record(error)
            theirs(kind, error, trace)

        return excepthook

    pythons, current = sys.__excepthook__, sys.excepthook
    first = recording(pythons)
    ours = (first, first if current is pythons else recording(current))  # a .pth file may have replaced it
    sys.__excepthook__, sys.excepthook = ours  # type: ignore[assignment] # of two types in typeshed

    # 2. An exception that only the program's own hook has seen: found at exit.
    def look() -> None:
        """Record the last exception, unless a hook of ours has seen it: one that is handled stays there, too."""
        error = getattr(sys, "last_value", None)
        is_ours = any(getattr(sys, "excepthook", None) is hook for hook in ours)
        if error is not None and os.getpid() == rank and not is_ours:
            record(error)

    atexit.register(look)

    # 3. The text of sys.exit.
    pythons_exit = sys.exit

    def leave(status: str | int | None = None, /) -> NoReturn:
        """Raise SystemExit, as `sys.exit` does, and record a text with which it ends the program.

        Python then writes the text to stderr without a frame of the program's. If the program catches the exception,
        whatever it writes next has frames.
        """
        stream = sys.stderr
        if type(status) is not str or not is_program() or "write" in getattr(stream, "__dict__", ("write",)):
            pythons_exit(status)
        error, trace = SystemExit(status), _trace_of(sys._getframe().f_back)

        def write(text: str) -> int:
            stream.__dict__.pop("write", None)
            if text is status and sys._getframe().f_back is None:
                record(error.with_traceback(trace))
            return stream.write(text)

        stream.__dict__["write"] = write
        raise error

    leave.__module__, leave.__qualname__ = "sys", "exit"  # programs pickle it, e.g. as a process's target
    sys.exit = leave

    # 4. Another Python in place of this one.
    execv = os.execv

    def become(path: Path, arguments: list[str]) -> NoReturn:
        """Exec a program. The Python that the rank becomes below e.g. ddtrace-run is watched, too."""
        if not is_program():
            execv(path, arguments)
        before = os.environ.get("PYTHONPATH")
        if (before or "").partition(os.pathsep)[0] != folder:
            os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else folder
        os.environ["NUMAPIN_RANK_PID"] = str(os.getsid(0))
        try:
            execv(path, arguments)
        finally:  # that failed
            del os.environ["NUMAPIN_RANK_PID"], os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before

    become.__module__, become.__qualname__ = "os", "execv"
    os.execv = become  # type: ignore[assignment] # of more types in typeshed

    # 5. A signal writes the main thread's stack, whatever it is doing, into a file with this name in /proc/PID/fd.
    # No Python code needs to run for that. The program may close the file.
    try:
        faulthandler.register(SIGRTMAX - 1, os.memfd_create("numapin-stack"), all_threads=False)
    except (AttributeError, OSError):  # a Python for older C libraries; a kernel that refuses it (vm.memfd_noexec)
        pass


def _trace_of(frame: FrameType | None) -> TracebackType | None:
    """Return the traceback of an exception raised in this frame. Before Python 3.12, SystemExit has none at the end."""
    try:
        raise SystemExit  # noqa: TRY301 - for the type of its traceback
    except SystemExit as error:
        kind = type(error.__traceback__)
    trace = None
    while frame is not None:
        trace = kind(trace, frame, frame.f_lasti, frame.f_lineno)  # type: ignore[misc]
        frame = frame.f_back
    return trace


def _has_ended() -> bool:
    """Return whether the program has ended: programs and C libraries may call the hook for errors that they survive."""
    frame = sys._getframe()  # documented, and the only way
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name not in _OUTERMOST_CODE


def _text_of(error: BaseException, now_s: float, library: Sequence[str]) -> str:
    """Return the exception as torch's error file has it. It is asked for its text once: its __str__ may do anything."""
    made = _pythons_traceback(library).TracebackException(type(error), error, error.__traceback__, limit=-_MOST_FRAMES)
    last = "".join(made.format_exception_only())
    if isinstance(error, SyntaxError):  # begins with the place
        last = type(error).__name__ + ": " + str(error)
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read, while DataLoader workers still use it
        shm_used = repr(1 - found.f_bavail / found.f_blocks)
    except (OSError, ZeroDivisionError):
        shm_used = "null"
    text = "".join(_cut(part, _MOST_CHARS_OF_PART) for part in made.format())
    trace, message = _quoted(_cut(text, _MOST_CHARS)), _quoted(_cut(last.strip(), _MOST_CHARS_OF_PART))
    facts = f'"timestamp": "{int(now_s)}", "time_s": {now_s!r}, "pid": {os.getpid()}, "shm_used": {shm_used}'
    extra = f'{{"py_callstack": {trace}, {facts}}}'
    return f'{{"message": {{"message": {message}, "extraInfo": {extra}}}}}'


def _pythons_traceback(library: Sequence[str]) -> ModuleType:
    """Return Python's module of that name. Raises an error if the program has other modules in place of its parts."""
    module = sys.modules.get("traceback")
    if module is None:
        # Modules beside the script may have such names. The program's other threads have this path for a moment, too.
        # Those of programs that import torch or logging do not: these have imported the module already.
        path = sys.path
        sys.path = [*library]
        try:
            module = __import__("traceback")
        finally:
            sys.path = path
    return module


def _cut(text: str, most: int) -> str:
    """Return a text; of a longer one, the beginning and the end, joined by a line that is indented as frames are."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}  [{len(text) - most} characters left out] {text[-(most // 2) :]}"


def _quoted(text: str) -> str:
    """Return a text as JSON has it, in ASCII."""
    is_plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return '"' + (text if is_plain else "".join(map(_escaped, text))) + '"'


def _escaped(char: str) -> str:
    """Return a character as a string of JSON has it."""
    number = ord(char)
    if " " <= char <= "~":
        return "\\" + char if char in '"\\' else char
    if number > 0xFFFF:
        number -= 0x10000
        return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
    return "\\n" if char == "\n" else f"\\u{number:04x}"


def _write(file: str, text: str) -> None:
    """Write a file as a whole, or not at all: the launcher may read it at any time."""
    new = file + "." + str(os.getpid())
    try:
        with open(new, "xb") as opened:
            opened.write(text.encode("ascii"))
        os.rename(new, file)
    finally:
        if os.path.exists(new):
            os.unlink(new)
