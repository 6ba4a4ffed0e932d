"""The private names of torch and torchdata that the data path overrides, calls or reads.

No release of torch promises to keep them. If one is missing or has other parameters, the data path is off: torch's own
loader makes the batches (data/install.py). Modules of the data path import private names from here, where a missing one
is a stand-in, so that they can still be imported.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from inspect import CO_VARARGS, unwrap
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Found: TypeAlias = CodeType | bool | None

    from torch._C import _remove_worker_pids, _set_worker_pids
    from torch._tensor import _rebuild_from_type_v2
    from torch._utils import ExceptionWrapper, _rebuild_tensor_v2, _rebuild_tensor_v3
    from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, collate
    from torch.utils.data._utils.collate import collate_tensor_fn
    from torch.utils.data._utils.worker import _IterableDatasetStopIteration
    from torch.utils.data.dataloader import (
        _BaseDataLoaderIter,
        _DatasetKind,
        _MultiProcessingDataLoaderIter,
        _SingleProcessDataLoaderIter,
    )
    from torchdata.stateful_dataloader.stateful_dataloader import (
        _StatefulMultiProcessingDataLoaderIter,
        _StatefulSingleProcessDataLoaderIter,
    )

TORCH, TORCHDATA = "torch", "torchdata"
STATEFUL: Final = "torchdata.stateful_dataloader.stateful_dataloader"
LAST: Final = {TORCH: "2.15", TORCHDATA: "0.11"}
"""The newest release of each with which the tests of the loader have passed."""

_USED_BY_BOTH: Final = (
    *("_in_order", "_pin_memory_thread", "_pin_memory_thread_done_event", "_rcvd_idx", "_shutdown", "_task_info"),
    *("_worker_pids_set", "_workers", "_workers_status"),
)
"""Attributes of the iterators with workers of both packages."""

NAMES: Final[dict[str, dict[str, str | None]]] = {
    "torch.utils.data.dataloader": {
        "DataLoader._get_iterator": "",
        "DataLoader.check_worker_number_rationality": "",
        "DataLoader._dataset_kind": None,
        "DataLoader._iterator": None,
        "_BaseDataLoaderIter.__init__": "loader",
        "_BaseDataLoaderIter._num_yielded": None,
        "_BaseDataLoaderIter._profile_name": None,
        "_SingleProcessDataLoaderIter.__init__": "loader",
        "_SingleProcessDataLoaderIter._next_data": "",
        "_MultiProcessingDataLoaderIter.__init__": "loader",
        "_MultiProcessingDataLoaderIter._mark_worker_as_unavailable": "worker_id shutdown",
        "_MultiProcessingDataLoaderIter._next_data": "",
        "_MultiProcessingDataLoaderIter._process_data": "data worker_idx",
        "_MultiProcessingDataLoaderIter._reset": "loader first_iter",
        "_MultiProcessingDataLoaderIter._shutdown_workers": "",
        "_MultiProcessingDataLoaderIter._try_get_data": "timeout",
        "_MultiProcessingDataLoaderIter._try_put_index": "",
        **dict.fromkeys(
            f"_MultiProcessingDataLoaderIter.{name}"
            for name in (*_USED_BY_BOTH, "_dataset_kind", "_send_idx", "_worker_queue_idx_cycle")
        ),
        "_DatasetKind.create_fetcher": "kind dataset auto_collation collate_fn drop_last",
        "_DatasetKind.Iterable": None,
    },
    "torch.utils.data._utils": {"MP_STATUS_CHECK_INTERVAL": None, "collate": None},
    "torch.utils.data._utils.collate": {
        "collate_tensor_fn": "batch collate_fn_map",
        "default_collate_fn_map": None,
    },
    "torch.utils.data._utils.worker": {"_IterableDatasetStopIteration.worker_id": None},
    "torch._C": {"DisableTorchFunctionSubclass": None, "_remove_worker_pids": None, "_set_worker_pids": None},
    "torch._tensor": {"_rebuild_from_type_v2": "func new_type args state"},
    "torch._utils": {
        "ExceptionWrapper.__init__": "exc_info where",
        "ExceptionWrapper.reraise": "",
        "_rebuild_tensor_v2": "storage storage_offset size stride requires_grad backward_hooks metadata",
        "_rebuild_tensor_v3": "storage storage_offset size stride requires_grad backward_hooks dtype metadata",
    },
    "torch.autograd.profiler": {"_is_profiler_enabled": None},
    "torch.cuda": {"_is_in_bad_fork": ""},
    "torch.storage": {"UntypedStorage._cdata": None, "UntypedStorage._new_shared": "size device"},
    "torch": {"Tensor._is_zerotensor": None, "Tensor._neg_view": None},
    STATEFUL: {
        "StatefulDataLoader._get_iterator": "",
        "StatefulDataLoader._iterator": None,
        "StatefulDataLoader.next_iter_state": None,
        "_StatefulSingleProcessDataLoaderIter.__init__": "loader next_iter_state",
        "_StatefulSingleProcessDataLoaderIter._next_data": "",
        "_StatefulMultiProcessingDataLoaderIter.__init__": "loader next_iter_state",
        "_StatefulMultiProcessingDataLoaderIter._mark_worker_as_unavailable": "worker_id shutdown",
        "_StatefulMultiProcessingDataLoaderIter._next_data": "",
        "_StatefulMultiProcessingDataLoaderIter._process_data": "data worker_id state_dict",
        "_StatefulMultiProcessingDataLoaderIter._reset": "loader first_iter prime_prefetch",
        "_StatefulMultiProcessingDataLoaderIter._shutdown_workers": "",
        "_StatefulMultiProcessingDataLoaderIter._try_get_data": "timeout",
        "_StatefulMultiProcessingDataLoaderIter._try_put_index": "",
        **dict.fromkeys(f"_StatefulMultiProcessingDataLoaderIter.{name}" for name in (*_USED_BY_BOTH, "_finished")),
    },
}
"""Names by module. A function has its parameters, without `self`; None: a value, a class or an attribute."""
CUDA_NAMES: Final = ("_cuda_getCurrentRawStream", "_cuda_getCurrentStream", "_cuda_getDevice", "_cuda_setStream")
"""Names of torch._C that only builds for a GPU have."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of many types
    """Return a private name of torch, or a stand-in for a missing one. Raises AttributeError for another name."""
    for module, names in NAMES.items():
        if name in {known.partition(".")[0] for known in names}:
            place = None
            with suppress(ImportError):
                place = import_module(module)
            return getattr(place, name, type(name, (), {}))
    raise AttributeError(name)


@cache
def why_off(package: str = TORCH) -> str:
    """Return why the data path is off for torch's loader, or torchdata's, which needs torch's names too; "": it is on.

    torch is imported; torchdata must have been.
    """
    import torch

    if package != TORCH and why_off():
        return why_off()
    problem = _first_problem(package, _in_process)
    if not problem and package == TORCH and torch.version.cuda is not None:
        missing = (name for name in CUDA_NAMES if not hasattr(torch._C, name))  # noqa: SLF001
        problem = next((f"has no torch._C.{name}" for name in missing), "")
    return problem and f"{package} {sys.modules[package].__version__} {problem}"


def explained(package: str = TORCH) -> str:
    """Return `why_off` as a sentence, with the consequence and the remedy; "" if the data path is on."""
    return _sentence(TORCH if why_off() else package, why_off(package))


def explained_in(folder: Path, package: str, release: str) -> str:
    """Return the same for a package that is not imported, as far as its Python files below `folder` show it."""
    problem = _first_problem(package, partial(_in_files, folder))
    return _sentence(package, problem and f"{package} {release} {problem}")


def _sentence(package: str, why: str) -> str:
    off = f"so numapin's data path is off, and {package}'s own DataLoader makes the batches"
    return why and f"{why}, {off}; install a newer numapin, or {package} {LAST[package]} or older"


def _first_problem(package: str, find: Callable[[str, str, str], Found]) -> str:
    """Return what a package lacks; "" if it has all names."""
    for module, names in NAMES.items():
        for name, parameters in names.items() if module.partition(".")[0] == package else ():
            owner, _, member = name.rpartition(".")
            if owner and find(module, "", owner) is False:
                return f"has no {module}.{owner}"
            found = find(module, owner, member)
            if found is False:
                return f"has no {module}.{name}"
            if parameters is None or not isinstance(found, CodeType) or found.co_flags & CO_VARARGS:
                continue  # a function of any arguments is somebody's wrapper
            has = found.co_varnames[: found.co_argcount + found.co_kwonlyargcount]
            if tuple(parameters.split()) not in (has, has[1:]):
                return f"has {module}.{name} with other parameters ({', '.join(has)})"
    return ""


def _in_process(module: str, owner: str, member: str) -> Found:
    """Find a name in a module that can be imported. An attribute of instances is one that the class's own code uses."""
    try:
        place: object = import_module(module)
    except ImportError:
        return False
    if owner:
        place = getattr(place, owner, None)
    if hasattr(place, member):
        found: Found = getattr(unwrap(getattr(place, member)), "__code__", True)
        return found
    return isinstance(place, type) and member in _used_by(place)


@cache
def _used_by(cls: type) -> frozenset[str]:
    """Return the names in the functions of a class and its bases, and in the functions that these wrap."""
    names: set[str] = set()
    seen: set[FunctionType] = set()  # a function may refer to itself
    functions = [value for base in cls.__mro__ for value in vars(base).values()]
    while functions:
        function = functions.pop()
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            names.update(function.__code__.co_names)
            functions += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return frozenset(names)


def _in_files(folder: Path, module: str, owner: str, member: str) -> Found:
    """Find a name in a module's Python file, which is compiled but not run; None: that does not show it."""
    code = _compiled(folder.joinpath(*module.split(".")))
    if code is None:
        return None
    scopes = [inner for inner in _inner(code) if inner.co_name == owner] if owner else [code]
    if not scopes:
        return None if owner in code.co_names else False  # another file's class
    functions = (inner for scope in scopes for inner in _inner(scope) if inner.co_name == member)
    used = {name for inner in (code, *_inner(code)) for name in (*inner.co_names, *inner.co_consts)}
    return next(functions, member in used)


@cache
def _compiled(path: Path) -> CodeType | None:
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        with suppress(OSError, SyntaxError, ValueError):
            return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    return None


def _inner(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _inner(inner)
