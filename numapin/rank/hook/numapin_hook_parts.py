"""The parts of the hook that wait for torch in an interpreter.

- NUMAPIN_DATALOADER: the first iterator of a torch DataLoader calls `numapin.data.install.install()` before it is
  created. A program that iterates no DataLoader never imports numapin for that.
- NUMAPIN_TRACE, NUMAPIN_STEPS: `numapin.trace.hook` and `numapin.steps.meter` record batches and optimizer steps.
- A rank of `numapin run`, and NUMAPIN_CHILDREN: the first iterator of a torch DataLoader attaches
  `numapin.steps.recorder`, which publishes the steps of the loop for `numapin top`.
- NUMAPIN_CHILDREN: the process is bound to its GPU as soon as that is known: now, if its environment names it; when the
  program imports torch, if the environment names it by then, as in a Ray actor; else at its first torch.cuda.set_device
  or CUDA context. A process that never uses a GPU stays as it is.

torch is loaded when the program imports it. Children inherit the variables and PYTHONPATH, which keeps this folder. So
every Python in a process tree runs this, possibly an interpreter without numapin: it uses only sys, os and _thread,
which are loaded anyway, and no syntax newer than Python 3.8. sitecustomize.py keeps it from older ones.
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
    from typing import Any, ClassVar

_LOADER = "torch.utils.data.dataloader"
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_OPTIMIZER = "torch.optim.optimizer"
_PROFILER = "torch.autograd.profiler"
_CHILDREN = "NUMAPIN_CHILDREN"
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_TORCHS = "torch's own DataLoader is used"
_UNCOUNTED = {"trace.hook": "it is not traced", "steps.meter": "its steps are not measured"}
_OTHER_VERSION = "use a version of numapin for this Python and this torch"
_OTHER_TORCH = "use a version of numapin for this torch"
_reported: list[str] = []  # what this process has said about its binding: one line is enough


def start(*, is_rank: bool) -> None:
    """Watch for torch; bind this process now if the environment says to what. `is_rank`: of `numapin run`."""
    choices = ("numapin", "numapin-balanced")
    install = [_install_on_use] if os.environ.get("NUMAPIN_DATALOADER") in choices else []
    trace = [lambda module: _count_steps("trace.hook", module)] if os.environ.get("NUMAPIN_TRACE") else []
    steps = [lambda module: _count_steps("steps.meter", module)] if os.environ.get("NUMAPIN_STEPS") else []
    children = bool(os.environ.get(_CHILDREN))
    publish = [_publish_on_use] if (is_rank or children) and not (trace or steps) else []
    by_module = {
        _LOADER: install + trace + steps + publish,
        _STATEFUL: install,
        _OPTIMIZER: trace + steps,
        _PROFILER: trace,
        "torch.cuda": [lambda module: _guarded(_patch_cuda, module)] if children else [],
        "torch.accelerator": [lambda module: _guarded(_patch_accelerator, module)] if children else [],
    }
    TorchWatch.todo = {name: callbacks for name, callbacks in by_module.items() if callbacks}
    if TorchWatch.todo:
        sys.meta_path.insert(0, TorchWatch)
    if children:
        _guarded(_take_known, "at its start")


class TorchWatch:
    """A finder that only looks: before torch is imported, and after modules of torch have been run.

    Programs also ask for a module's spec to see whether there is one, so it patches until the module has been run.
    """

    todo: ClassVar[dict[str, Sequence[Callable[[ModuleType], None]]]] = {}  # the functions to call with each module

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the later finders' spec for the modules to patch, and None for every other module."""
        if name == "torch" and os.environ.get(_CHILDREN):
            _guarded(_take_known, "before torch was imported")
        if name not in cls.todo:
            return None
        finders = [*sys.meta_path]  # those before this one have been asked
        later = finders[finders.index(cls) + 1 :] if cls in finders else finders
        specs = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            _guarded(cls._call_after_import, spec.loader)
        return spec

    @classmethod
    def _call_after_import(cls, loader: Any) -> None:
        """Call the functions once the loader has run its module, which keeps its ordinary loader and spec."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this function, which hides the method
            loader.exec_module(module)
            callbacks = cls.todo.pop(module.__name__, ())
            if not cls.todo and cls in sys.meta_path:
                sys.meta_path.remove(cls)
            for callback in callbacks:
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


def _publish_on_use(module: ModuleType) -> None:
    """Attach the recorder to this module before its first iterator, for `numapin top`.

    An interpreter that cannot import numapin publishes nothing.
    """
    base = getattr(module, "_BaseDataLoaderIter", None)
    if base is None:
        return

    def as_before(cls: type, *arguments: object, **named: object) -> object:
        theirs: Any = super(base, cls).__new__  # a mixin's, or object's, which takes no arguments
        return theirs(cls) if theirs is object.__new__ else theirs(cls, *arguments, **named)

    def __new__(cls: type, *arguments: object, **named: object) -> object:  # noqa: N807 - replaces the method
        base.__new__ = staticmethod(as_before)
        was_there = "numapin" in sys.modules
        try:
            if not was_there:
                _import_package()
            from numapin.steps.recorder import attach

            attach(module)
        except Exception:  # the loop is not shown in top; nothing else of the program may change
            ours = [] if was_there else [name for name in sys.modules if name.partition(".")[0] == "numapin"]
            for name in ours:
                del sys.modules[name]
        return base.__new__(cls, *arguments, **named)

    base.__new__ = staticmethod(__new__)


def _count_steps(part: str, module: ModuleType) -> None:
    """Let `numapin trace` or `numapin compare` count the steps of this module. If this interpreter cannot, warn."""
    try:
        attach = __import__(f"numapin.{part}", fromlist=["attach"]).attach
    except (ImportError, SyntaxError, AttributeError) as error:  # AttributeError: another version of numapin
        _warn(f"cannot import numapin ({error})", _UNCOUNTED[part], _remedy(error))
    else:
        attach(module)


# --- numapin exec --children ---------------------------------------------------------------------------------------


def _patch_cuda(module: Any) -> None:
    """Bind this process before it sets its device, and when CUDA is initialized without one."""
    if not (hasattr(module, "set_device") and hasattr(module, "_lazy_init")):
        _warn_unbound("this torch has no torch.cuda.set_device or _lazy_init", _OTHER_TORCH)
        return
    index_of = getattr(module, "_get_device_index", _plain_index)
    _before_call(module, "set_device", index_of)
    own_init = module._lazy_init

    def lazy_init() -> None:
        own_init()
        if module._lazy_init is lazy_init:  # it is called often, and once is enough
            module._lazy_init = own_init
        _guarded(_call_own, "cuda_is_initialized", _report)

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
        _guarded(_call_own, "take", number, f"{module.__name__}.{name}({number})")
        return theirs(device, *rest, **named)

    setattr(module, name, wrapper)


def _plain_index(device: Any) -> int:
    """Return a device's number, for a torch without its own function for that; -1 if it has none."""
    text = str(device).rpartition(":")[2]
    return int(text) if text.isdecimal() else -1


def _take_known(moment: str) -> None:
    """Bind this process if a variable that may name its device has another value than the command's."""
    for line in os.environ.get(_CHILDREN, "").split("\n")[1:-1]:
        name, equals, value = line.partition("=")
        now = os.environ.get(name)
        if now and (not equals or now != value):
            _call_own("take_known", moment)
            return


def _call_own(name: str, *arguments: object) -> None:
    """Call a function of the module that binds. Warn if it cannot be imported."""
    try:
        if "numapin" not in sys.modules:
            _import_package()
        from numapin.children import own
    except (ImportError, SyntaxError, AttributeError) as error:  # another version of numapin, or an older Python
        _fail(f"cannot import numapin ({error})", "install this version of numapin for that interpreter")
    else:
        getattr(own, name)(*arguments)


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
    """Call a function of ours in the user's program; below `exec --children`, no error of ours reaches it."""
    try:
        function(*arguments)
    except Exception as error:
        if not os.environ.get(_CHILDREN):
            raise
        _report(error)


def _report(error: Exception) -> None:
    _fail(f"{type(error).__name__}: {error}", "report this, and go on with: numapin.bind_this_process")


def _fail(problem: str, remedy: str) -> None:
    """Warn; with --strict, end this process."""
    _warn_unbound(problem, remedy)
    if os.environ.get(_CHILDREN, "").partition("\n")[0].endswith(" strict"):
        os._exit(5)


def _warn_unbound(problem: str, remedy: str) -> None:
    """Warn once that this process is not bound."""
    if not _reported:
        _reported.append(problem)
        _warn(problem, "this process is not bound", remedy)


# --- warnings ---------------------------------------------------------------------------------------------------------


def _remedy(error: Exception) -> str:
    """Return what to do about an error from the import of numapin."""
    is_missing = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "numapin"
    return "install numapin for that interpreter" if is_missing else _OTHER_VERSION


def _warn(problem: str, consequence: str, remedy: str) -> None:
    """Write one line to stderr; never raise."""
    from contextlib import suppress

    text = f"numapin: warning: {sys.executable} {problem}: {consequence}; hint: {remedy}"
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)  # paths may contain control sequences
    with suppress(Exception):  # stderr may be full, closed or replaced
        sys.stderr.write(shown + "\n")
