"""The CPUs of roles, in a rank's interpreter and in those of its children. Edge.

Comes in: an interpreter that starts with this file's folder on PYTHONPATH, and NUMAPIN_ROLES, such as
`main=0-1 optimizer=2-5 loader=6-7`; its main thread is on the CPUs of `main`. Goes out: the same interpreter, in which
the threads of torch's CPU operators start on the CPUs of `optimizer`, and DataLoader workers on those of `loader`.

OpenMP binds its own threads as it starts them, so that none has to be found and moved: torch is imported with
OMP_PLACES in the environment, whose first place is `main`, for the thread that calls an operator, and all others
`optimizer`. The library reads it once, when it is loaded with torch, and ignores CPUs that the calling thread may not
use then. So that thread has the CPUs of both roles until OpenMP is loaded, and the variables are gone afterwards. A
pool that was started earlier, to be moved, would hang in children that the program forks.

A worker changes its CPUs before it runs anything else, also one that was forked; so do threads that it has already.

Every Python in a rank's process tree runs it, possibly one without numapin: it uses sys and os only, and no syntax
newer than Python 3.8.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing's would cost each interpreter 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Protocol

    class _Loader(Protocol):
        """The loader of a module, as an object whose method can be replaced."""

        exec_module: Callable[[ModuleType], None]

    Execute = Callable[[Callable[[ModuleType], None], ModuleType], None]


_TORCH = "torch"
_WORKERS = ("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.worker")
_PLACING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_MAX_VARIABLE_BYTES = 120_000  # Linux allows 128 KiB
_MOST_THREADS = 256  # with more, OpenMP gives several threads to each place, those of the main thread included


class _Watch:
    """A finder that only patches: it makes the loaders of some modules run them as we want.

    Programs also ask for a module's spec to see whether there is one, so it patches until the module has been run.
    """

    def __init__(self, todo: dict[str, Execute]) -> None:
        self._todo = todo

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the other finders' spec for the modules to patch, and None for every other module."""
        if name not in self._todo:
            return None
        spec = self._spec_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            self._patch(name, spec.loader)  # type: ignore[arg-type] # a method can be replaced
        return spec

    def _spec_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        return next(filter(None, specs), None)

    def _patch(self, name: str, loader: _Loader) -> None:
        """Let the loader run its module as we want. The module keeps its ordinary loader and spec."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this function, which hides the method
            execute = self._todo.pop(name, None)
            if not self._todo and self in sys.meta_path:
                sys.meta_path.remove(self)
            if execute is None:
                loader.exec_module(module)
            else:
                execute(loader.exec_module, module)

        loader.exec_module = exec_module


# --- the threads of torch's CPU operators ----------------------------------------------------------------------------


def _placing(main: set[int], optimizer: set[int]) -> Execute:
    """Return the function that imports torch and has OpenMP bind its threads."""

    def execute(run: Callable[[ModuleType], None], module: ModuleType) -> None:
        if os.sched_getaffinity(0) != main or any(os.environ.get(name) for name in _PLACING):
            run(module)  # the program has placed this thread, or OpenMP's, elsewhere
            return
        before = _threads()
        os.sched_setaffinity(0, main | optimizer)
        os.environ["OMP_PROC_BIND"] = "close"
        os.environ["OMP_PLACES"] = _places(main, optimizer)
        try:
            run(module)
            is_placed = os.sched_getaffinity(0) == main  # OpenMP binds the thread that loads it to the first place
        finally:
            del os.environ["OMP_PROC_BIND"], os.environ["OMP_PLACES"]
            _bind(_threads() - before | {_this_thread()}, main)
        if not is_placed:
            _warn("OpenMP was loaded before torch, or is not GNU's: its threads use the main thread's CPUs")

    return execute


def _places(main: set[int], optimizer: set[int]) -> str:
    """Return the list of places: as many for the optimizer's threads as fit into a variable."""
    first, other = _place(main), _place(optimizer)
    count = min(_MOST_THREADS, (_MAX_VARIABLE_BYTES - len(first)) // (len(other) + 1))
    return ",".join([first] + [other] * count)


def _place(cpus: set[int]) -> str:
    """Return a place of OpenMP, with intervals as FIRST:LENGTH."""
    starts = [cpu for cpu in sorted(cpus) if cpu - 1 not in cpus]
    ends = [cpu + 1 for cpu in sorted(cpus) if cpu + 1 not in cpus]
    return "{" + ",".join(map(_interval, starts, ends)) + "}"


def _interval(start: int, end: int) -> str:
    return f"{start}:{end - start}"


def _threads() -> set[int]:
    """Return the threads of this process."""
    return set(map(int, os.listdir("/proc/self/task")))


def _this_thread() -> int:
    from threading import get_native_id

    return get_native_id()


def _bind(threads: set[int], cpus: set[int]) -> None:
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cpus)
        except OSError:  # it has ended; or a cpuset has changed, and `numapin verify` finds where the thread is
            pass


# --- the workers of DataLoaders --------------------------------------------------------------------------------------


def _moving_workers(loader: set[int]) -> Execute:
    """Return the function that imports torch's module for workers, and has each worker begin on the loader's CPUs."""

    def execute(run: Callable[[ModuleType], None], module: ModuleType) -> None:
        from functools import wraps

        run(module)
        torchs_own = getattr(module, "_worker_loop", None)
        if torchs_own is None:
            _warn("this torch has no _worker_loop: workers use the main thread's CPUs")
            return

        @wraps(torchs_own)  # pickled by its name
        def _worker_loop(*arguments: object, **named: object) -> object:
            _bind(_threads(), loader)
            return torchs_own(*arguments, **named)

        module._worker_loop = _worker_loop  # type: ignore[attr-defined]

    return execute


# --- the start -------------------------------------------------------------------------------------------------------


def _warn(problem: str) -> None:
    """Write one line to stderr; never raise."""
    try:
        sys.stderr.write("numapin: warning: --cores-for: " + problem + "; hint: see where they are: numapin verify\n")
    except (OSError, AttributeError):  # stderr may be full or closed
        pass


def start() -> None:
    """Watch for torch."""
    try:
        todo = _todo(os.environ.get("NUMAPIN_ROLES", ""))
    except (ValueError, AttributeError):  # not what numapin writes; or not Linux
        todo = {}
    if todo:
        sys.meta_path.insert(0, _Watch(todo))


def _todo(roles: str) -> dict[str, Execute]:
    """Return how to run which modules. Raises ValueError."""
    cpus = {name: _numbers(text) for name, _, text in (word.partition("=") for word in roles.split())}
    todo: dict[str, Execute] = {}
    if "optimizer" in cpus and not _is_started_by_multiprocessing():
        todo[_TORCH] = _placing(cpus["main"], cpus["optimizer"])
    if "loader" in cpus:
        todo.update(dict.fromkeys(_WORKERS, _moving_workers(cpus["loader"])))
    return todo


def _is_started_by_multiprocessing() -> bool:
    """Return whether multiprocessing has started this interpreter: it may become a worker, which has other CPUs."""
    words = getattr(sys, "orig_argv", [])
    return any(word == "--multiprocessing-fork" or word.startswith("from multiprocessing.") for word in words)


def _numbers(text: str) -> set[int]:
    """Return the CPUs in a list such as 0-3,8. Raises ValueError."""
    found: set[int] = set()
    for item in text.split(","):
        first, _, last = item.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
