"""Private names of torch and torchdata: all are declared; if one is renamed, torch's own loader makes the batches."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import pytest
import torch

import numapin
from tests.contract.datasets import Raise
from tests.contract.seam import CUDA_NAMES, LAST, NAMES, STATEFUL, TORCH, TORCHDATA, torch_names
from tests.data.warm import run_script

ROOT = Path(numapin.__file__).parent
SITE = Path(torch.__file__).parents[1]
LOADER = "torch.utils.data.dataloader"
PUT_INDEX = "_MultiProcessingDataLoaderIter._try_put_index"
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
    of_both = {(module, name.partition(".")[0]) for module, names in NAMES.items() for name in names}
    for name in {name for module, name in of_both if module.partition(".")[0] in packages}:
        assert getattr(getattr(torch_names, name), "__module__", "torch") != "numapin.data.torch_names"


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (lambda self, *, further=0: None, f"has {LOADER}.{PUT_INDEX} with other parameters (self, further)"),  # noqa: ARG005
        (lambda *arguments, **named: None, ""),  # noqa: ARG005 - a wrapper, of which the parameters tell nothing
    ],
)
def test_parameters(method: Callable[..., None], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method with parameters that numapin does not know turns the path off; a wrapper of any arguments does not.

    torch itself says which release it is: one that was built from source may have no record of its installation.
    """
    monkeypatch.setattr(torch_names._MultiProcessingDataLoaderIter, "_try_put_index", method)
    monkeypatch.setattr("importlib.metadata.Distribution.from_name", Raise(PackageNotFoundError, (TORCH,)))
    torch_names.why_off.cache_clear()
    try:
        found = torch_names.why_off()
    finally:
        torch_names.why_off.cache_clear()
    assert found == (f"torch {torch.__version__} {why}" if why else "")


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
    monkeypatch.setattr(torch_names, "import_module", Raise(ModuleNotFoundError, ("gone",)))
    assert torch_names.collate_tensor_fn.__module__ == "numapin.data.torch_names"
    assert torch_names._first_problem(TORCH, torch_names._in_process).startswith("has no ")


IN_CPP = {"UntypedStorage._cdata", "Tensor._is_zerotensor", "Tensor._neg_view"}
"""Attributes of classes that Python cannot change."""
EACH_NAME = {
    (module, known)
    for module, names in NAMES.items()
    for name in names
    for known in (name, name.partition(".")[0])
    if not known.endswith(".__init__") and known not in IN_CPP
}


@pytest.mark.parametrize(("module", "name"), sorted(EACH_NAME))
def test_a_renamed_name_is_noticed(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """The problem names it, whether it is a module's, a class's, or an attribute that the class's code uses."""
    package = module.partition(".")[0]
    place: Any = pytest.importorskip(module, reason="no torchdata; type: pip install .[dev]")
    owner, _, member = name.rpartition(".")

    def renamed(code: CodeType) -> CodeType:
        return code.replace(co_names=tuple(f"{used}_2" if used == member else used for used in code.co_names))

    places = getattr(place, owner).__mro__ if owner else (place,)
    functions = [value for each in places if owner for value in vars(each).values()]
    with monkeypatch.context() as patch:
        for each in places:
            if member in vars(each):
                patch.delattr(each, member)
        for function in functions:  # and what it wraps
            if isinstance(function, FunctionType) and member in function.__code__.co_names:
                patch.setattr(function, "__code__", renamed(function.__code__))
            cells = getattr(function, "__closure__", None) or ()
            functions += [cell.cell_contents for cell in cells if cell != CellType()]
        torch_names._used_by.cache_clear()
        problem = torch_names._first_problem(package, torch_names._in_process)
    torch_names._used_by.cache_clear()
    assert problem.startswith("has no ")
    assert problem.endswith(f".{member}")


LOOPS = """
import json, pkgutil, sys, types
import torch.utils.data
import numapin
from numapin.data import torch_names
from numapin.data.torch_names import STATEFUL, TORCHDATA

if sys.argv[1] == TORCHDATA:
    import torchdata.stateful_dataloader.stateful_dataloader as theirs
    Theirs = theirs.StatefulDataLoader
else:
    Theirs = torch.utils.data.DataLoader
package, hidden = sys.argv[1:]
owner, _, member = hidden.rpartition(".")
if owner:  # torch itself has another name
    owner = pkgutil.resolve_name(owner)
    if hasattr(owner, member):
        owner.renamed = getattr(owner, member)
        delattr(owner, member)
    for function in vars(owner).values():
        if code := getattr(function, "__code__", None):
            names = tuple("renamed" if name == member else name for name in code.co_names)
            function.__code__ = code.replace(co_names=names)
import_module = torch_names.import_module

def import_without(module):
    if not module.startswith(package) or module == "torch":
        return import_module(module)
    if not hidden:
        raise ModuleNotFoundError(name=module)
    there = vars(import_module(module)).items()
    return types.SimpleNamespace(**{name: value for name, value in there if name != hidden})

if not owner:
    torch_names.import_module = import_without

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.tensor(float(index), dtype=torch.float64)

def batches(loader):
    return [[str(batch.dtype), *batch.tolist()] for batch in loader]

cast = {torch.float64: torch.float32}
loader = numapin.DataLoader(Rows(), batch_size=2, num_workers=1, cast=cast, device_transform=torch.neg)
seen = {"numapin": batches(loader), "notes": loader.stats().notes}
loader.close()
mark = loader.pin_memory_device
seen["copy"] = batches(torch.utils.data.DataLoader(Rows(), batch_size=2, pin_memory_device=mark))
seen["alone"] = batches(numapin.DataLoader(Rows(), batch_size=2))
try:
    numapin.DataLoader(Rows(), strict=True)
except numapin.BindingRefused as error:
    seen["strict"] = error.message
from numapin.data.install import install
install()
seen["theirs"] = batches(Theirs(Rows(), batch_size=2, num_workers=1))
print(json.dumps(seen))
"""

RENAMED = (
    f"{LOADER}.DataLoader._get_iterator",
    f"{LOADER}.{PUT_INDEX}",
    "torch.autograd.profiler._is_profiler_enabled",
)


@pytest.mark.parametrize(
    ("package", "hidden", "problem"),
    [
        (TORCH, "", "torch.utils.data.dataloader.DataLoader"),  # all names are missing
        (TORCH, "_MultiProcessingDataLoaderIter", "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"),
        (TORCH, "_rebuild_tensor_v2", "torch._utils._rebuild_tensor_v2"),
        *((TORCH, name, name) for name in RENAMED),
        (TORCHDATA, "", f"{STATEFUL}.StatefulDataLoader"),
        (TORCHDATA, "_StatefulMultiProcessingDataLoaderIter", f"{STATEFUL}._StatefulMultiProcessingDataLoaderIter"),
    ],
)
def test_a_missing_name_costs_the_path_not_the_batches(tmp_path: Path, package: str, hidden: str, problem: str) -> None:
    """All loaders make their batches, cast and transformed as asked; one line names what is missing, and the remedy.

    `hidden` is a name that numapin does not find, or, with dots, one that torch itself does not have.
    """
    if package == TORCHDATA and not find_spec(TORCHDATA):
        pytest.skip("no torchdata; type: pip install .[dev]")
    status, out, err = run_script(tmp_path, LOOPS, (package, hidden))
    assert status == 0, err
    found = json.loads(out)
    wide: Any = [["torch.float64", 0.0, 1.0], ["torch.float64", 2.0, 3.0]]
    narrow: Any = [["torch.float32", -0.0, -1.0], ["torch.float32", -2.0, -3.0]]  # numapin's loader negates them
    assert (found["numapin"], found["alone"], found["theirs"]) == (narrow, wide, wide), err
    assert found["copy"] == narrow  # as a framework makes it, from the loader's arguments
    (line,) = [each for each in err.splitlines() if "uses numapin's data path" not in each]
    assert line.startswith(f"numapin: warning: {package} ")
    assert f" has no {problem}" in line
    assert f", so numapin's data path is off, and {package}'s own DataLoader makes the batches; " in line
    assert line.endswith(f"; install a newer numapin, or {package} {LAST[package]} or older")
    explained = line.removeprefix("numapin: warning: ")
    assert (found["notes"], found.get("strict")) == (([explained], explained) if package == TORCH else ([], None))
