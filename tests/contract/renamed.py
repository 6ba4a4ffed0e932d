"""Rename private names of torch, one at a time, and run loops of both loaders: python -m tests.contract.renamed.

Each name is renamed in a child of its own, together with every use in torch's and torchdata's Python code, as a later
release would do it. Writes what each child saw to stdout, as JSON by name.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

import numapin.data.locality  # once, instead of in each child; none of these binds a private name
import numapin.data.opening
import numapin.data.pool
import numapin.data.usage_log
from numapin.data.torch_names import NAMES, STATEFUL, TORCHDATA

if TYPE_CHECKING:
    from collections.abc import Callable

USERS = (
    *("torch.utils.data", "torch._utils", "torch._tensor", "torch.storage", "torch.multiprocessing", "torch.cuda"),
    *("torch.random", "torch.mps", "torch.mtia", "torch.xpu", "torch.autograd", "torch.nn.parameter", "torchdata."),
)
"""The modules whose code is changed: other users of these names take no part in loading."""
IN_CPP = {"torch.storage.UntypedStorage._cdata", "torch.Tensor._is_zerotensor", "torch.Tensor._neg_view"}
"""Attributes of classes that Python cannot change."""


class Rows(Dataset[torch.Tensor]):
    """Four numbers."""

    def __len__(self) -> int:
        """Return the number of items."""
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return an item."""
        return torch.tensor(float(index), dtype=torch.float64)


def renamed(name: str) -> str:
    """Return the new name."""
    return f"{name}_of_a_later_torch"


def rename(owner: str, name: str) -> None:
    """Rename a module's name, or a class's, wherever torch's Python code uses it."""
    for module in [module for key, module in sys.modules.items() if key.startswith(USERS)]:
        _rename_in(module, name)
    top = import_module(owner.partition(":")[0])
    place: Any = top if ":" not in owner else getattr(top, owner.partition(":")[2])
    if hasattr(place, name):  # a C++ module's
        setattr(place, renamed(name), getattr(place, name))
        delattr(place, name)


def _rename_in(module: ModuleType, name: str) -> None:
    for key, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner in vars(value).values():
                _rename_code(inner, name)
            if name in vars(value):
                moved = vars(value)[name]
                delattr(value, name)
                setattr(value, renamed(name), moved)
        _rename_code(value, name)
        if key == name:
            delattr(module, name)
            setattr(module, renamed(name), value)
            if isinstance(value, type):
                value.__name__ = value.__qualname__ = renamed(name)


def _rename_code(thing: object, name: str) -> None:
    for part in (thing, *(getattr(thing, part, None) for part in ("__func__", "fget", "fset", "__wrapped__"))):
        if isinstance(part, FunctionType):
            part.__code__ = _code(part.__code__, name)


def _code(code: CodeType, name: str) -> CodeType:
    return code.replace(
        co_names=tuple(renamed(used) if used == name else used for used in code.co_names),
        co_consts=tuple(
            _code(part, name) if isinstance(part, CodeType) else renamed(name) if part == name else part
            for part in code.co_consts
        ),
    )


def loops(package: str) -> dict[str, object]:
    """Run loops with numapin's loader, and with a package's own; return the batches, and what numapin reports."""
    from numapin.data.install import install

    loader = numapin.DataLoader(
        Rows(), batch_size=2, num_workers=1, cast={torch.float64: torch.float32}, device_transform=torch.neg
    )
    seen: dict[str, object] = {"numapin": _batches(loader), "notes": loader.stats().notes}
    loader.close()
    mark = loader.pin_memory_device
    seen["copy"] = _batches(torch.utils.data.DataLoader(Rows(), batch_size=2, pin_memory_device=mark))
    seen["alone"] = _batches(numapin.DataLoader(Rows(), batch_size=2))
    try:
        numapin.DataLoader(Rows(), strict=True)
    except numapin.BindingRefused as error:
        seen["strict"] = error.message
    install()
    theirs: Any = sys.modules[STATEFUL].StatefulDataLoader if package == TORCHDATA else torch.utils.data.DataLoader
    seen[package] = _batches(theirs(Rows(), batch_size=2, num_workers=1))
    return seen


def _batches(loader: Any) -> list[object]:
    return [[str(batch.dtype), *batch.tolist()] for batch in loader]


def in_child(package: str, change: Callable[[], None]) -> dict[str, object]:
    """Change torch and run the loops in a forked child; return what it saw and wrote to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder, "result"), Path(folder, "errors")
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
            try:
                change()
                result.write_text(json.dumps(loops(package)))
            except BaseException:  # noqa: BLE001 - the parent's code must not run here
                sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        seen: dict[str, object] = json.loads(result.read_text()) if result.exists() else {}
        return seen | {"stderr": errors.read_text()}


def targets() -> dict[str, tuple[str, str]]:
    """Return each name of the table, and each private class in it, with its place and last part."""
    found = {}
    for module, names in NAMES.items():
        classes = {name.rpartition(".")[0] for name in names}
        for name in (*names, *(owner for owner in classes if owner.startswith("_"))):
            owner, _, member = name.rpartition(".")
            if member != "__init__" and f"{module}.{name}" not in IN_CPP:
                found[f"{module}.{name}"] = (f"{module}:{owner}" if owner else module, member)
    return found


def main() -> None:
    """Rename each of them in a child."""
    seen = {
        name: in_child(name.partition(".")[0], partial(rename, *target))
        for name, target in targets().items()
        if target[0].partition(":")[0] in sys.modules
    }
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    with suppress(ImportError):
        import_module(STATEFUL)
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it
    main()
