"""What `numapin run --dataloader numapin` and `numapin trace` put before a rank's own program. Edge.

Comes in: an interpreter that starts with this file's folder on PYTHONPATH, and NUMAPIN_DATALOADER or NUMAPIN_TRACE.
Goes out: the same interpreter, in which the first iterator of a torch DataLoader calls `numapin.data.install.install()`
before it is made, or `numapin.trace.hook` counts batches and optimizer steps. torch loads when the program says so; a
program that iterates no DataLoader, and is not traced, never imports numapin.

Python runs one `sitecustomize`, the first on its path. So this one takes its folder off the path and imports the name
again: the one that it hides, if any, becomes `sys.modules["sitecustomize"]`, and its errors, or the error that there is
none, go to `site` as they would without us.

Every Python of a rank's process tree runs this, an interpreter without numapin perhaps: only sys, os and _thread, which
are there anyway, and no syntax newer than Python 3.8.
"""  # noqa: INP001 - a folder that is put on the path is no package

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False  # as typing's own, which would cost each interpreter 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_LOADER = "torch.utils.data.dataloader"
_OPTIMIZER = "torch.optim.optimizer"
_PROFILER = "torch.autograd.profiler"


class _LoaderWatch:
    """A finder that finds nothing itself: it has the loaders of torch's modules call us when they have finished."""

    todo: dict[str, Sequence[Callable[[Any], None]]] = {}  # module -> what to call with it  # noqa: RUF012

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return what the other finders find for torch's modules, None for every other."""
        del path, target
        if name not in cls.todo:
            return None
        import importlib.util

        acts = cls.todo.pop(name)
        if not cls.todo:
            sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _after(spec.loader, acts)
        return spec


def _after(loader: Any, acts: Sequence[Callable[[Any], None]]) -> None:  # noqa: ANN401 - what the path's finder returned
    """Call these once this loader has run its module. The module's loader and spec stay the ordinary ones."""

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # this function, which hid the method
        loader.exec_module(module)
        for act in acts:
            act(module)

    loader.exec_module = exec_module


def _arm(module: Any) -> None:  # noqa: ANN401 - torch's, which cannot be imported for its type here
    """Put `numapin.data.install` before the first iterator of a loader.

    Not now: torch imports its DataLoader while it is itself half imported, and most processes iterate none.
    """
    cls = module.DataLoader
    torchs_own, lock, installed = cls._get_iterator, _thread.allocate_lock(), False

    def _get_iterator(self: Any) -> Any:  # noqa: ANN401 - as torch's
        nonlocal installed
        if installed:  # asked by what was installed, to which this is torch's own
            return torchs_own(self)
        with lock:  # other threads wait until it is decided who makes iterators
            if not installed:
                _install()
                installed = True
        return cls._get_iterator(self)

    cls._get_iterator = _get_iterator


def _install() -> None:
    """Take torch's loaders over; where this interpreter cannot, say why in a line and leave them as they are."""
    try:
        from numapin.data.install import install
    except (ImportError, SyntaxError) as error:  # another interpreter: without numapin, or too old for it
        _tell(error, "torch's own DataLoader is used")
    else:
        install()


def _trace(module: Any) -> None:  # noqa: ANN401 - torch's
    """Let `numapin trace` count what this module does; where this interpreter cannot, say why in a line."""
    try:
        from numapin.trace.hook import attach
    except (ImportError, SyntaxError) as error:
        _tell(error, "it is not traced")
    else:
        attach(module)


def _tell(error: Exception, consequence: str) -> None:
    from contextlib import suppress

    text = (
        f"numapin: warning: {sys.executable} cannot import numapin ({error}): {consequence}; "
        "hint: install numapin for that interpreter"
    )
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)  # paths may hold a terminal's commands
    with suppress(OSError, AttributeError):  # stderr may be full or closed
        sys.stderr.write(shown + "\n")


def _start() -> None:
    """Watch for torch, and hand over to the sitecustomize that this one hides."""
    folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib costs 4 ms
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    loader = [_arm] if os.environ.get("NUMAPIN_DATALOADER") == "numapin" else []
    trace = [_trace] if os.environ.get("NUMAPIN_TRACE") else []
    todo = ((_LOADER, loader + trace), (_OPTIMIZER, trace), (_PROFILER, trace))
    _LoaderWatch.todo = {name: acts for name, acts in todo if acts}
    if _LoaderWatch.todo:
        sys.meta_path.insert(0, _LoaderWatch)
    del sys.modules[__name__]
    __import__(__name__)


if __name__ == "sitecustomize":
    _start()
