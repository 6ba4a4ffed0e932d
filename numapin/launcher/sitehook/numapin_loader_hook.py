"""The hook of `numapin run --dataloader numapin`, `trace` and `compare` in a rank's interpreter. Edge.

Comes in: an interpreter that starts with this file's folder on PYTHONPATH, and NUMAPIN_DATALOADER, NUMAPIN_TRACE or
NUMAPIN_STEPS. Goes out: the same interpreter, in which the first iterator of a torch DataLoader calls
`numapin.data.install.install()` before it is created, or `numapin.trace.hook` or `numapin.compare.hook` counts batches
and optimizer steps. torch is loaded when the program imports it. A program that iterates no DataLoader, and is neither
traced nor compared, never imports numapin.

Every Python in a rank's process tree runs this, possibly an interpreter without numapin. So it uses only sys, os and
_thread, which are loaded anyway, and no syntax newer than Python 3.8. sitecustomize.py keeps it from older ones.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False  # importing typing's would cost each interpreter 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import ClassVar, Protocol

    class _TorchLoader(Protocol):
        """The loader of a module, as an object whose method can be replaced."""

        exec_module: Callable[[ModuleType], None]


_LOADER = "torch.utils.data.dataloader"
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_OPTIMIZER = "torch.optim.optimizer"
_PROFILER = "torch.autograd.profiler"
_TORCHS = "torch's own DataLoader is used"
_OTHER_VERSION = "use a version of numapin for this Python and this torch"


class _LoaderWatch:
    """A finder that only patches: it makes the loaders of torch's modules call us when they have finished.

    Programs also ask for a module's spec to see whether there is one, so it patches until the module has been run.
    """

    todo: ClassVar[dict[str, Sequence[Callable[[ModuleType], None]]]] = {}
    """The functions to call with each module."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the later finders' spec for torch's modules, and None for every other module."""
        if name not in cls.todo:
            return None
        spec = cls._spec_by_later(name, path, target)
        if spec is not None and spec.loader is not None:
            _call_after_import(spec.loader, cls.take)  # type: ignore[arg-type] # a method can be replaced
        return spec

    @classmethod
    def _spec_by_later(cls, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Ask the finders behind this one; Python has asked those before it."""
        finders = [*sys.meta_path]
        later = finders[finders.index(cls) + 1 :] if cls in finders else finders
        specs = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        return next(filter(None, specs), None)

    @classmethod
    def take(cls, name: str) -> Sequence[Callable[[ModuleType], None]]:
        """Return the functions to call with a module that has been run, once; remove this finder after the last."""
        callbacks = cls.todo.pop(name, ())
        if not cls.todo and cls in sys.meta_path:
            sys.meta_path.remove(cls)
        return callbacks


def _call_after_import(loader: _TorchLoader, take: Callable[[str], Sequence[Callable[[ModuleType], None]]]) -> None:
    """Call what `take` returns once the loader has run its module. The module keeps its ordinary loader and spec."""

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # this function, which hides the method
        loader.exec_module(module)
        for callback in take(module.__name__):
            callback(module)

    loader.exec_module = exec_module


def _install_on_use(module: ModuleType) -> None:
    """Run `numapin.data.install` before the first iterator of a loader of this module.

    Not now: torch imports its DataLoader while torch is half imported, and most processes iterate no loader. A subclass
    of the loader may make torch's iterators itself, so these are waited for, too.
    """
    lock, installed = _thread.allocate_lock(), False

    def install_before(cls: type, name: str) -> None:
        torchs_own = getattr(cls, name)

        def method(*arguments: object, **named: object) -> object:
            nonlocal installed
            if installed:  # called by our installed method, which takes this one for torch's own
                return torchs_own(*arguments, **named)
            with lock:  # other threads wait until the installation has succeeded or failed
                if not installed:
                    _install()
                    installed = True
            return getattr(cls, name)(*arguments, **named)

        setattr(cls, name, method)

    name = "StatefulDataLoader" if hasattr(module, "StatefulDataLoader") else "DataLoader"
    loader = getattr(module, name, object)
    if not hasattr(loader, "_get_iterator"):
        _warn(f"cannot use numapin's DataLoader (this torch has no {name}._get_iterator)", _TORCHS, _OTHER_VERSION)
        return
    install_before(loader, "_get_iterator")
    if hasattr(module, "_BaseDataLoaderIter"):
        install_before(module._BaseDataLoaderIter, "__init__")  # the base of all iterators


def _install() -> None:
    """Replace torch's DataLoader. If this interpreter cannot, warn and leave it as it is."""
    try:
        from numapin.data.install import install
    except (ImportError, SyntaxError) as error:  # an interpreter without numapin, or too old for it
        _warn(f"cannot import numapin ({error})", _TORCHS, _remedy(error))
    else:
        if os.environ.get("NUMAPIN_DATALOADER") == "numapin-balanced":
            install(balance=True)
        else:
            install()


def _trace(module: ModuleType) -> None:
    """Let `numapin trace` count the steps of this module. If this interpreter cannot, warn."""
    try:
        from numapin.trace.hook import attach
    except (ImportError, SyntaxError) as error:
        _warn(f"cannot import numapin ({error})", "it is not traced", _remedy(error))
    else:
        attach(module)


def _count_steps(module: ModuleType) -> None:
    """Let `numapin compare` count the steps of this module. If this interpreter cannot, warn."""
    try:
        from numapin.compare.hook import attach
    except (ImportError, SyntaxError) as error:
        _warn(f"cannot import numapin ({error})", "its steps are not measured", _remedy(error))
    else:
        attach(module)


def _remedy(error: Exception) -> str:
    """Return what to do about an error from the import of numapin."""
    is_missing = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "numapin"
    return "install numapin for that interpreter" if is_missing else _OTHER_VERSION


def _warn(problem: str, consequence: str, remedy: str) -> None:
    """Write one line to stderr; never raise."""
    from contextlib import suppress

    text = f"numapin: warning: {sys.executable} {problem}: {consequence}; hint: {remedy}"
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)  # paths may contain control sequences
    with suppress(OSError, AttributeError):  # stderr may be full or closed
        sys.stderr.write(shown + "\n")


def start() -> None:
    """Watch for torch."""
    _LoaderWatch.todo = _callbacks()
    if _LoaderWatch.todo:
        sys.meta_path.insert(0, _LoaderWatch)


def _callbacks() -> dict[str, Sequence[Callable[[ModuleType], None]]]:
    """Return the functions to call with each of torch's modules, as the variables say."""
    choices = ("numapin", "numapin-balanced")
    install = [_install_on_use] if os.environ.get("NUMAPIN_DATALOADER") in choices else []
    trace = [_trace] if os.environ.get("NUMAPIN_TRACE") else []
    steps = [_count_steps] if os.environ.get("NUMAPIN_STEPS") else []
    by_module = {_LOADER: install + trace + steps, _STATEFUL: install, _OPTIMIZER: trace + steps, _PROFILER: trace}
    return {name: callbacks for name, callbacks in by_module.items() if callbacks}
