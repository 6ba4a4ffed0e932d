"""Private names of torch and torchdata: all are declared; if one is renamed, torch's own loader makes the batches."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import numapin
from tests.contract import renamed
from tests.contract.seam import CUDA_NAMES, LAST, NAMES, STATEFUL, TORCH, TORCHDATA, torch_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(numapin.__file__).parent
SITE = Path(torch.__file__).parents[1]
OURS = {"_numapin_noted", "_rank"}
"""Private names of ours: an attribute that loaders get, and one that torch's loader has, too."""
OF_OTHERS = {"_exit", "_fields", "_getframe", "_replace", "_extra_reducers", "_C", "_preload_modules"}
"""Private names of Python's standard library and of numpy, and the module torch._C."""


def _data_path() -> dict[Path, ast.Module]:
    files = [*(ROOT / "data").rglob("*.py"), ROOT / "pinned.py"]
    return {file: ast.parse(file.read_text()) for file in files if file.name != "torch_names.py"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _members(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of members: attributes, methods, and strings that are given to a call, as to hasattr."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) if _is_private(name):
                yield name
            case ast.Call(args=[*_, ast.Constant(str(name))]) | ast.Call(args=[ast.Constant(str(name)), *_]):
                yield from (name,) if name.isidentifier() and _is_private(name) else ()


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code defines itself: functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name


def test_every_private_name_is_declared() -> None:
    """Each private name that is torchdata's, torch's loader's, or not defined by the data path is in the table."""
    trees = _data_path().values()
    used = {name for tree in trees for name in _members(tree)}
    own = {name for tree in trees for name in _defined(tree)}
    modules = ("torch.utils.data.dataloader", STATEFUL)
    files = [SITE.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
    theirs = {name for file in files if file.exists() for name in _members(ast.parse(file.read_text()))}
    declared = {part for names in NAMES.values() for name in names for part in name.split(".")} | {*CUDA_NAMES}
    assert (used & theirs | used - own) - declared == (OURS & used) | (OF_OTHERS & used)


def test_private_names_are_imported_from_one_module() -> None:
    """A missing name must not keep a module of the data path from being imported."""
    imported = [
        f"{file.name}: {node.module}.{alias.name}"
        for file, tree in _data_path().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(TORCH)
        for alias in node.names
        if "._" in f"{node.module}.{alias.name}"
    ]
    assert imported == []


def test_this_torch_is_known() -> None:
    """Nothing is missing here, neither in the imported modules nor in their files, and no stand-in is in use."""
    packages = (TORCH, *((TORCHDATA,) if find_spec(TORCHDATA) else ()))
    assert [torch_names.why_off(package) for package in packages] == [""] * len(packages)
    assert [torch_names.explained_in(SITE, package, "") for package in packages] == [""] * len(packages)
    for name in torch_names.__all__:
        assert getattr(getattr(torch_names, name), "__module__", "torch") != "numapin.data.torch_names"


def _differ(self: Any, *, further: int = 0) -> None:
    """Take the place of torch's `_try_put_index`, with a parameter that numapin does not know."""


def _wrap(*arguments: Any, **named: Any) -> None:
    """Take its place as a library's wrapper does, of which the parameters tell nothing."""


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (
            _differ,
            "has torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_put_index with other parameters ",
        ),
        (_wrap, ""),
    ],
)
def test_parameters(method: Callable[..., None], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method with parameters that numapin does not know turns the path off; a wrapper of any arguments does not."""
    monkeypatch.setattr(torch_names._MultiProcessingDataLoaderIter, "_try_put_index", method)
    torch_names.why_off.cache_clear()
    try:
        found = torch_names.why_off()
    finally:
        torch_names.why_off.cache_clear()
    assert found == (f"torch {torch.__version__} {why}(self, further)" if why else "")


@pytest.mark.parametrize("name", ["_try_put_index", "_workers", "_MultiProcessingDataLoaderIter"])
def test_files_without_a_name(name: str, tmp_path: Path) -> None:
    """The names of a torch that is not imported are looked up in its files; what is not there says nothing."""
    place = tmp_path / "torch/utils/data/dataloader.py"
    place.parent.mkdir(parents=True)
    text = (SITE / place.relative_to(tmp_path)).read_text()
    place.write_text(text)
    assert torch_names.explained_in(tmp_path, TORCH, "2.99") == ""
    torch_names._compiled.cache_clear()
    place.write_text(re.sub(rf"\b{name}\b", f"{name}_2", text))
    found = torch_names.explained_in(tmp_path, TORCH, "2.99")
    assert found.startswith("torch 2.99 has no torch.utils.data.dataloader._MultiProcessingDataLoaderIter")
    assert f"{name}, so numapin's data path is off" in found


def test_a_function_that_refers_to_itself() -> None:
    """The search in the code of a class ends, as with wrappers that count their calls."""

    class Patched:
        def method(self) -> None:
            """Use a name, and this function."""
            self._name = inner

    def inner() -> object:
        thing: Any = Patched()
        return inner, thing._other

    Patched.__iter__ = inner  # type: ignore[attr-defined]
    assert {"_name", "_other"} <= torch_names._used_by(Patched)


def test_a_module_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are stand-ins, so the data path can be imported, and the check finds the first of them."""

    def missing(name: str) -> object:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(torch_names, "import_module", missing)
    assert torch_names.reduce_tensor.__module__ == "numapin.data.torch_names"
    assert torch_names._first_problem(TORCH, torch_names._in_process).startswith("has no ")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Return what loops saw with each name renamed."""
    command = [sys.executable, "-m", renamed.__name__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True, cwd=ROOT.parent)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.xdist_group("renamed")
@pytest.mark.timeout(1200)  # for loops in some 80 processes
@pytest.mark.parametrize("name", sorted(renamed.targets()))
def test_a_renamed_name_costs_the_path_not_the_batches(name: str, seen: dict[str, Any]) -> None:
    """All loaders make their batches, cast and transformed as asked; one line names what is missing, and the remedy."""
    package = name.partition(".")[0]
    if package == TORCHDATA and not find_spec(TORCHDATA):
        pytest.skip("no torchdata; type: pip install .[dev]")
    found = seen[name]
    wide: Any = [["torch.float64", 0.0, 1.0], ["torch.float64", 2.0, 3.0]]
    narrow: Any = [["torch.float32", -0.0, -1.0], ["torch.float32", -2.0, -3.0]]  # numapin's loader negates them
    lines = [line for line in found["stderr"].splitlines() if "uses numapin's data path" not in line]
    assert (found.get("numapin"), found.get("alone"), found.get(package)) == (narrow, wide, wide), "\n".join(lines)
    (line,) = lines
    off = TORCH if "strict" in found else TORCHDATA  # a name of both is torch's
    assert line.startswith(f"numapin: warning: {off} ")
    assert f".{name.rpartition('.')[2]}" in line
    assert f", so numapin's data path is off, and {off}'s own DataLoader makes the batches; " in line
    assert line.endswith(f"; install a newer numapin, or {off} {LAST[off]} or older")
    assert found["copy"] == narrow  # as a framework makes it, from the loader's arguments
    if off == TORCH:
        explained = line.removeprefix("numapin: warning: ")
        assert (found["notes"], found["strict"]) == ([explained], explained)
    else:
        assert found["notes"] == []
