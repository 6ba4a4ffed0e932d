"""The hook of `numapin exec --children` in each Python below the command. Edge.

Comes in: an interpreter that starts with this file's folder on PYTHONPATH, and NUMAPIN_CHILDREN. Goes out: the same
interpreter, which is bound to its GPU as soon as that is known: now, if its environment names it; when the program
imports torch, if the environment names it by then, as in a Ray actor; else at its first torch.cuda.set_device or CUDA
context. torch is loaded when the program imports it. A process that never uses a GPU stays as it is.

Children inherit PYTHONPATH, which keeps this folder. Every Python below the command runs this, possibly an interpreter
without numapin. So it uses only sys and os, which are loaded anyway, and no syntax newer than Python 3.8. Its
errors are reported once, and never reach the program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing's would cost each interpreter 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_VARIABLE = "NUMAPIN_CHILDREN"
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))
_NOT_BOUND = "this process is not bound"
_reported: list[str] = []


class _TorchWatch:
    """A finder that only looks: before torch is imported, and after torch.cuda and torch.accelerator have been.

    Programs also ask for a module's spec to see whether there is one, so it patches until the module has been run.
    """

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the later finders' spec for the modules to patch, and None for every other module."""
        if name == "torch":
            _guarded(_take_known, "before torch was imported")
        if name not in _patches:
            return None
        spec = cls._spec_by_later(name, path, target)
        if spec is not None and spec.loader is not None:
            _guarded(_call_after_import, spec.loader, cls._patch)
        return spec

    @classmethod
    def _spec_by_later(cls, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Ask the finders behind this one; Python has asked those before it."""
        finders = [*sys.meta_path]
        later = finders[finders.index(cls) + 1 :] if cls in finders else finders
        specs = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        return next(filter(None, specs), None)

    @classmethod
    def _patch(cls, module: ModuleType) -> None:
        """Patch a module that has been run, once; remove this finder after the last."""
        patch = _patches.pop(module.__name__, None)
        if not _patches and cls in sys.meta_path:
            sys.meta_path.remove(cls)
        if patch is not None:
            _guarded(patch, module)


def _call_after_import(loader: Any, patch: Callable[[ModuleType], None]) -> None:
    """Call this once the loader has run its module. The module keeps its ordinary loader and spec."""

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # this function, which hides the method
        loader.exec_module(module)
        patch(module)

    loader.exec_module = exec_module


def _patch_cuda(module: Any) -> None:
    """Bind this process before it sets its device, and when CUDA is initialized without one."""
    if not (hasattr(module, "set_device") and hasattr(module, "_lazy_init")):
        _warn("this torch has no torch.cuda.set_device or _lazy_init", "use a version of numapin for this torch")
        return
    index_of = getattr(module, "_get_device_index", _plain_index)
    _before_call(module, "set_device", index_of)
    own_init = module._lazy_init

    def lazy_init() -> None:
        own_init()
        if module._lazy_init is lazy_init:  # it is called often, and once is enough
            module._lazy_init = own_init
        _guarded(_cuda_is_initialized)

    lazy_init.__name__ = lazy_init.__qualname__ = "_lazy_init"
    module._lazy_init = lazy_init


def _patch_accelerator(module: Any) -> None:
    """Bind this process before it sets its device through torch.accelerator."""
    index_of = getattr(module, "_get_device_index", _plain_index)
    for name in ("set_device_index", "set_device_idx"):
        if hasattr(module, name):
            _before_call(module, name, index_of)


def _before_call(module: Any, name: str, index_of: Callable[..., int]) -> None:
    """Replace a function that sets this process's device by one that binds the process first."""
    import functools

    theirs = getattr(module, name)

    @functools.wraps(theirs)
    def wrapper(device: Any, *rest: Any, **named: Any) -> Any:
        try:
            number = index_of(device)
        except Exception:  # not a device: their function says so
            number = -1
        _guarded(_take, number, f"{module.__name__}.{name}")
        return theirs(device, *rest, **named)

    setattr(module, name, wrapper)


_patches = {"torch.cuda": _patch_cuda, "torch.accelerator": _patch_accelerator}


def _plain_index(device: Any) -> int:
    """Return a device's number, for a torch without its own function for that; -1 if it has none."""
    text = str(device).rpartition(":")[2]
    return int(text) if text.isdecimal() else -1


def _take(number: int, how: str) -> None:
    own = _own()
    if own is not None:
        own.take(number, f"{how}({number})")


def _take_known(moment: str) -> None:
    if _may_be_known(os.environ.get(_VARIABLE, "")):
        own = _own()
        if own is not None:
            own.take_known(moment)


def _cuda_is_initialized() -> None:
    """Bind a process that sees one device; let a thread wait for the first context of one that sees several."""
    own = _own()
    if own is None:
        return
    own.fix_devices()
    if own.is_settled():
        return
    if own.only_device():
        own.take(0, "CUDA was initialized")
        return
    from numapin.children import watch

    if not watch.start(_report):
        own.take(0, "CUDA was initialized", is_guess=True)


def _may_be_known(text: str) -> bool:
    """Return whether a variable that may name a device has another value than the command's."""
    for line in text.split("\n")[1:-1]:
        name, equals, value = line.partition("=")
        now = os.environ.get(name)
        if now and (not equals or now != value):
            return True
    return False


def _own() -> Any:
    """Import what binds. Warn if that fails."""
    try:
        if "numapin" not in sys.modules:
            _import_package()
        from numapin.children import own
    except (ImportError, SyntaxError, AttributeError) as error:  # another version of numapin, or an older Python
        _fail(f"cannot import numapin ({error})", "install this version of numapin for that interpreter")
        return None
    return own


def _import_package() -> None:
    """Import the numapin that this file belongs to: the interpreter may have none, and the script's folder another."""
    import importlib.util

    folder = os.path.join(_PACKAGE_PARENT, "numapin")
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("numapin", file, submodule_search_locations=[folder])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["numapin"] = module
        spec.loader.exec_module(module)


def _guarded(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of ours in the user's program: no error of ours reaches it."""
    try:
        function(*arguments)
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    _fail(f"{type(error).__name__}: {error}", "report this, and go on with: numapin.bind_this_process")


def _fail(problem: str, remedy: str) -> None:
    """Warn; with --strict, end this process."""
    _warn(problem, remedy)
    if os.environ.get(_VARIABLE, "").partition("\n")[0].endswith(" strict"):
        os._exit(5)


def _warn(problem: str, remedy: str) -> None:
    """Write one line to stderr, once a process; never raise."""
    if _reported:
        return
    _reported.append(problem)
    text = f"numapin: warning: {sys.executable} {problem}: {_NOT_BOUND}; hint: {remedy}"
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)  # paths may contain control sequences
    from contextlib import suppress

    with suppress(Exception):  # stderr may be full, closed or replaced
        sys.stderr.write(shown + "\n")


def start() -> None:
    """Bind now if the environment says to what, else watch for torch."""
    if os.environ.get(_VARIABLE):
        sys.meta_path.insert(0, _TorchWatch)
        _guarded(_take_known, "at its start")
