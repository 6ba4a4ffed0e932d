"""The record of an uncaught exception in a rank's interpreter. Edge.

Comes in: an interpreter that starts with this file's folder first on PYTHONPATH, and TORCHELASTIC_ERROR_FILE. Goes out:
the same interpreter, without a trace of this in its environment and its path. If an exception ends its program, that
file has it, with the time, before the traceback is printed and before `atexit` functions run; in the format of torch's
@record, unless @record has written it already.

Nothing that the program prints changes, nor its exit status. `sys.excepthook` and `sys.__excepthook__` are one function
here as well, because programs compare them; it records the exception and calls Python's own. If a program replaces the
hook by one that does not call the former, the exception is in `sys.last_value`, at which the last of the `atexit`
functions looks; the time is then that of Python's end.

Children do not inherit this. Python imports only the first `sitecustomize` on its path, so this one imports the name
again once its folder is off the path, as `launcher/sitehook` does. It uses no syntax newer than Python 3.8. It does not
import json, because a module beside the script may have that name.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident  # bound now: programs replace these functions in their modules
from time import time

TYPE_CHECKING = False  # importing typing's would cost each rank 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType, TracebackType

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_MOST_CHARS = 1 << 16  # of a traceback; of a longer one, the first and the last frames
_MOST_CHARS_OF_PART = 1 << 13  # of a frame, or of an exception's message
_MOST_FRAMES = 2000  # the last ones of each exception
_MOST_COPIED = 1 << 20  # characters of a message that Python's module may copy
_MOST_TRIES = 3  # a signal handler may raise meanwhile: torch's does when a DataLoader worker has died
_OF_PROGRAMS = ("<module>", "_run_module_as_main")  # the outermost code of a script or a module that is still running


def _start() -> None:
    """Leave the path and the environment as they would be without this; in a rank, watch for its exception."""
    _leave_paths(os.path.dirname(__file__))
    try:
        _watch_if_rank(os.environ.get("TORCHELASTIC_ERROR_FILE"))
    except Exception:  # the program must start, and the next `sitecustomize` be imported
        pass
    del sys.modules[__name__]
    __import__(__name__)


def _leave_paths(folder: str) -> None:
    """Take this file's folder off Python's path and off PYTHONPATH, of which it is the first entry."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first != folder:
        return
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        del os.environ["PYTHONPATH"]


def _watch_if_rank(file: str | None) -> None:
    if file and os.getsid(0) == os.getpid():  # each rank leads a session; its children do not
        _watch(file)


def _watch(file: str) -> None:
    """Record the exception that ends this process's program."""
    import atexit

    rank, thread, library = os.getpid(), get_ident(), _library_path()

    def recording(theirs: Hook) -> Hook:
        """Return a hook that records the exception and calls theirs."""

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            now_s = time()
            if os.getpid() == rank and get_ident() == thread and _has_ended():  # a fork has this hook, too
                _record(file, error, now_s, library)
            theirs(kind, error, trace)

        return excepthook

    pythons, current = sys.__excepthook__, sys.excepthook
    first = recording(pythons)
    ours = (first, first if current is pythons else recording(current))  # a .pth file may have replaced it
    sys.__excepthook__, sys.excepthook = ours  # type: ignore[assignment] # of two types in typeshed

    def look() -> None:
        """Record the last exception, unless a hook of ours has seen it: one that is handled stays there, too."""
        error = getattr(sys, "last_value", None)
        is_ours = any(getattr(sys, "excepthook", None) is hook for hook in ours)
        if error is not None and os.getpid() == rank and not is_ours:
            _record(file, error, time(), library)

    atexit.register(look)


def _has_ended() -> bool:
    """Return whether the program has ended: programs and C libraries may call the hook for errors that they survive."""
    frame = sys._getframe()  # documented, and the only way
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name not in _OF_PROGRAMS


def _record(file: str, error: BaseException, now_s: float, library: Sequence[str]) -> None:
    """Write an exception. Never raise, and never replace a file."""
    for number in range(_MOST_TRIES):
        try:
            _try_to_record(file, error, now_s, None if number == _MOST_TRIES - 1 else library)
            break
        # A program must end in the same way, whatever goes wrong here: a signal handler raised, or the program has a
        # module with the name of one that this imports.
        except BaseException:
            pass


def _try_to_record(file: str, error: BaseException, now_s: float, library: Sequence[str] | None) -> None:
    if os.path.exists(file):
        return
    parts, last = _texts_of(error, library)
    trace, message = _quoted(_within(parts, _MOST_CHARS)), _quoted(_cut(last.strip(), _MOST_CHARS_OF_PART))
    extra = f'{{"py_callstack": {trace}, "timestamp": "{int(now_s)}", "time_s": {now_s!r}}}'
    _write(file, f'{{"message": {{"message": {message}, "extraInfo": {extra}}}}}')


def _texts_of(error: BaseException, library: Sequence[str] | None) -> tuple[list[str], str]:
    """Return the parts of an exception's traceback, the last of which are its message, and this message alone.

    Without Python's library, the plain ones.
    """
    traceback = None if library is None or _is_long(error) else _pythons_traceback(library)
    return _plain_texts_of(error) if traceback is None else _formatted(traceback, error)


def _formatted(traceback: ModuleType, error: BaseException) -> tuple[list[str], str]:
    """Return the same as Python's module writes it."""
    # It asks the exception for its text once. A program's own __str__ may do anything.
    made = traceback.TracebackException(type(error), error, error.__traceback__, limit=-_MOST_FRAMES)
    last = "".join(made.format_exception_only())
    if isinstance(error, SyntaxError):  # begins with the place
        last = type(error).__name__ + ": " + str(error)
    return list(made.format()), last


def _is_long(error: BaseException) -> bool:
    """Return whether an exception has megabytes to say, each copy of which Python's module holds in memory."""
    return any(isinstance(part, (str, bytes)) and len(part) > _MOST_COPIED for part in error.args)


def _plain_texts_of(error: BaseException) -> tuple[list[str], str]:
    """Return the same without the lines of the source and the exceptions before it."""
    parts, step = ["Traceback (most recent call last):\n"], error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        parts.append(f'  File "{code.co_filename}", line {step.tb_lineno}, in {code.co_name}\n')
        step = step.tb_next
    try:
        message = _cut(str(error), _MOST_CHARS_OF_PART)
    except Exception:  # the program's own __str__
        message = "<exception str() failed>"
    last = f"{type(error).__name__}: {message}"
    return [*parts[:1], *parts[1:][-_MOST_FRAMES:], last + "\n"], last


def _library_path() -> list[str]:
    """Return the standard library's entries of the path. The script's folder is not there yet."""
    folder = os.path.dirname(os.__file__)
    beside = (folder, os.path.join(folder, "lib-dynload"))
    return [entry for entry in sys.path if isinstance(entry, str) and (entry in beside or entry.endswith(".zip"))]


def _pythons_traceback(library: Sequence[str]) -> ModuleType | None:
    """Return Python's module of that name; None if the program has imported other modules in place of what it needs."""
    module = sys.modules.get("traceback")
    if module is None:
        module = _imported_traceback(library)
    is_pythons = os.path.dirname(str(getattr(module, "__file__", ""))) in library
    return module if is_pythons and hasattr(module, "TracebackException") else None


def _imported_traceback(library: Sequence[str]) -> ModuleType | None:
    """Import it, and what it needs, although modules beside the script may have such names.

    The program's other threads have this path for a moment, too. Those of programs that import torch or logging do not:
    these have imported the module already.
    """
    path = sys.path
    sys.path = [*library]
    try:
        import traceback
    except Exception:
        return None
    finally:
        sys.path = path
    return traceback


def _within(parts: Sequence[str], most: int) -> str:
    """Return the parts as one text; if it is too long, the first and the last of them."""
    whole = [_cut(part, _MOST_CHARS_OF_PART) for part in parts]
    if sum(map(len, whole)) <= most:
        return "".join(whole)
    first = _num_parts(whole, most // 4)
    last = _num_parts(whole[::-1], most - most // 4)
    left_out = f"  [{len(whole) - first - last} entries left out]\n"
    return "".join([*whole[:first], left_out, *whole[len(whole) - last :]])


def _num_parts(parts: Sequence[str], most: int) -> int:
    """Return how many of the first parts have at most this many characters."""
    number, size = 0, 0
    for part in parts:
        size += len(part)
        if size > most:
            break
        number += 1
    return number


def _cut(text: str, most: int) -> str:
    """Return a text; of a longer one, the beginning and the end."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [{len(text) - most} characters left out] {text[-(most // 2) :]}"


def _quoted(text: str) -> str:
    """Return a text as JSON has it, in ASCII."""
    return '"' + (text if _is_plain(text) else "".join(map(_escaped, text))) + '"'


def _is_plain(text: str) -> bool:
    """Return whether a string of JSON has the text as it is."""
    return text.isascii() and text.isprintable() and '"' not in text and "\\" not in text


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
    """Write a file as a whole, or not at all: torch's agent fails if it reads a part. Do not replace a file."""
    new = file + "." + str(os.getpid())
    try:
        with open(new, "xb") as opened:
            opened.write(text.encode("ascii"))
        if not os.path.exists(file):
            os.rename(new, file)
    finally:
        if os.path.exists(new):
            os.unlink(new)


if __name__ == "sitecustomize":
    _start()
