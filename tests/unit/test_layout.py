"""The design's rules on modules, read from the source with `ast`: who imports what, how long they are, what they say.

One direction: errors, cpulist <- fields, request <- topology.model <- build, allot, plan, view <- edges <- cli.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import numapin

PACKAGE = Path(numapin.__file__).parent
MODULES = {
    ".".join(("numapin", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

PURE = (
    *("bounds", "strictjson"),
    *("errors", "printable", "cpulist", "sizes", "openmp", "fields", "request", "allot", "allot_memory", "plan"),
    *("view", "tasks", "slices", "task_plan", "forks"),
    *("observed", "report", "verify", "top", "lost"),
    *("topology.address", "topology.model", "topology.readings", "topology.build", "topology.visible"),
    *("topology.links", "topology.hwloc", "topology.nccl", "topology.xmlfile"),
    *("bench.model", "bench.transfer", "bench.alloc", "bench.overlap", "bench.launch", "bench.exec", "bench.nearest"),
    *(f"doctor.{name}" for name in ("model", "placement", "host", "software", "advice", "examine")),
    "jobs",
    *("trace.intervals", "trace.records", "trace.reading", "trace.analysis", "trace.findings", "trace.report"),
    *("trace.settings", "trace.timeline", "trace.pace"),
)
IMPURE = {"os", "pathlib", "subprocess", "ctypes", "torch", "pynvml", "numa", "click", "socket", "shutil", "tempfile"}

# Library -> the only modules that may import it, as far as they exist; a package stands for all that is in it.
ONLY_IN = {
    "pynvml": ("topology.nvml",),
    "ctypes": ("native", "cuda", "topology.libnuma"),
    "numa": ("native", "topology.libnuma"),
    "torch": ("launch", "agent", "torchrun", "data", "pinned", "bench", "trace.hook", "trace.tracer"),
    "click": ("cli",),
    "rich": ("cli", "view"),
}

# A layer imports none of the layers after it; within one layer everything goes, but for cycles.
LAYERS = (
    ("bounds", "strictjson", "errors", "printable", "cpulist", "topology.address"),
    ("fields", "request", "observed", "tasks"),
    ("topology.model", "topology.readings"),
    ("topology.links", "topology.build", "topology.visible", "topology.hwloc", "topology.nccl", "topology.xmlfile"),
    ("allot", "allot_memory", "plan", "slices", "task_plan", "report", "verify", "top"),
    ("cli", "__main__"),
)


def _within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == f"numapin.{name}" or module.startswith(f"numapin.{name}.") for name in names)


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def _imports(module: str, *, at_run_time: bool = True) -> frozenset[str]:
    """Return what a module imports, inside functions too; imports for types only are left out at run time."""
    found: set[str] = set()
    todo: list[ast.AST] = [_tree(module)]
    while todo:
        node = todo.pop()
        if at_run_time and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            base = node.module or ""
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
        todo += ast.iter_child_nodes(node)
    return frozenset(found)


def test_the_reader_of_imports_sees_them() -> None:
    """The tests below are not green because nothing was read: a few imports that are known are found."""
    assert "numapin.cpulist" in _imports("numapin.plan")
    assert "numapin.allot" in _imports("numapin.plan")  # inside a function
    assert "numapin.topology.model" not in _imports("numapin.plan")  # for types only
    assert "os" in _imports("numapin.topology.discover")


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_nothing_that_acts(name: str) -> None:
    """What decides neither reads nor writes: no os, no pathlib, no process, no library that looks at hardware."""
    for module in (module for module in MODULES if _within(module, (name,))):
        assert not {imported.partition(".")[0] for imported in _imports(module, at_run_time=False)} & IMPURE, module


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_pure_ones_only(name: str) -> None:
    """What a pure module imports of ours is pure, so that nothing acts through a back door."""
    for module in (module for module in MODULES if _within(module, (name,))):
        ours = {imported for imported in _imports(module) if imported.startswith("numapin.")}
        assert {imported for imported in ours if not _within(imported, PURE)} == set(), module


@pytest.mark.parametrize("module", MODULES)
def test_libraries_have_one_place(module: str) -> None:
    """pynvml, ctypes, numa, torch, click and rich are each imported where the design says and nowhere else."""
    for imported in {name.partition(".")[0] for name in _imports(module, at_run_time=False)} & ONLY_IN.keys():
        assert _within(module, ONLY_IN[imported]), f"{module} imports {imported}"


@pytest.mark.parametrize("module", MODULES)
def test_layers_import_downwards(module: str) -> None:
    """A module imports nothing from a layer above its own; only the command line imports the command line."""
    own = next((i for i, names in enumerate(LAYERS) if _within(module, names)), None)
    above = LAYERS[-1:] if own is None else LAYERS[own + 1 :]
    wrong = {name for name in _imports(module) if any(_within(name, names) for names in above)}
    assert wrong == set()


def test_there_is_no_import_cycle() -> None:
    """Modules can be put in an order in which each imports only earlier ones."""
    left = {m: {i for i in _imports(m) if i in MODULES and i != m} - {"numapin"} for m in MODULES if m != "numapin"}
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert left == {}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_comes_in_and_what_goes_out(module: str) -> None:
    """The docstring has the stage's input and output in these words; the package itself says what it is."""
    text = ast.get_docstring(_tree(module)) or ""
    assert text
    if module != "numapin":
        assert "comes in" in text.lower(), f"{module}: what comes in?"
        assert "goes out" in text.lower(), f"{module}: what goes out?"


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_stay_short(module: str) -> None:
    """No module is above 400 lines, and no function above 40 without its docstring."""
    assert len(MODULES[module].read_text().splitlines()) <= 400
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            start = node.body[1 if doc and len(node.body) > 1 else 0].lineno
            assert (node.end_lineno or 0) - start < 40, f"{module}.{node.name}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_happens_at_import(module: str) -> None:
    """No statement of a module itself reads the environment, opens a file, loads a library or sets up logging."""
    effects = {"open", "os.getenv", "os.environ.get", "ctypes.CDLL", "CDLL", "logging.basicConfig", "Path.home"}
    for node in _tree(module).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            called = {ast.unparse(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
            assert not called & effects, module
