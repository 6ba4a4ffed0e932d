"""The design's rules on modules, read from the source with `ast`: who imports what, what they list."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path

import numapin
from tests.unit.seam import hiding_variables

PACKAGE = Path(numapin.__file__).parent
MODULES = {
    ".".join(("numapin", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Folders and modules that neither read nor write. What is pure imports only what is pure.
PURE = (
    *("errors", "base.cpu_set", "base.formats", "base.text", "base.records", "base.stats"),
    *("system.libraries", "system.refusals"),
    *("topology.address", "topology.model", "topology.readings", "topology.build", "topology.fast"),
    *("topology.visible", "topology.vendors", "topology.nics"),
    *("topology.sources.hwloc", "topology.sources.nccl", "topology.sources.xmlfile"),
    *("plan", "tasks.identify", "tasks.hosts", "tasks.slice"),
    *("children.table", "children.frameworks"),
    *(f"launcher.{name}" for name in ("options", "store", "failure")),
    *("observe.model", "observe.verify", "observe.top", "attach.report", "view", "jobs"),
    *("bench.model", "bench.verdict", "compare.variants", "compare.report", "steps.record"),
    *("base.redact", "base.bounds", "base.strict_json"),
    *(f"doctor.{name}" for name in ("check", "network", "nvidia", "software")),
    *(f"trace.{name}" for name in ("records", "analysis", "findings", "report")),
)
IMPURE = {"os", "pathlib", "subprocess", "ctypes", "torch", "pynvml", "numa", "click", "socket", "shutil", "tempfile"}

# Library -> the only folders and modules that may import it.
ONLY_IN = {
    "pynvml": ("topology.sources.nvml",),
    "ctypes": ("system", "topology.sources.libnuma"),
    "numa": ("system.calls", "topology.sources.libnuma"),
    "torch": (
        *("launcher", "data", "pinned", "sharing.passing", "bench", "steps.meter"),
        *("trace.hook", "trace.script", "trace.tracer"),
    ),
    "click": ("cli",),
    "rich": ("cli", "view"),
}

# Folders in the order in which data moves. A module imports its own folder and those of lines above its own.
LAYERS = (
    ("base", "errors"),
    ("system",),
    ("topology",),
    ("plan",),
    ("rank",),
    ("steps",),
    ("launcher",),
    ("launch",),
    ("spawning", "tasks"),
    ("children",),
    ("data",),
    ("pinned", "sharing", "observe"),
    ("attach",),
    ("trace", "doctor", "jobs"),
    ("bench",),
    ("compare",),
    ("view",),
    ("cli",),
    ("__main__",),
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


def test_the_rules_hold_for_something() -> None:
    """A few imports that are known are found, and no name in the lists above has lost its modules."""
    assert {"numapin.base.cpu_set", "numapin.plan.usable"} <= _imports("numapin.plan.make")  # one inside a function
    assert "numapin.topology.model" not in _imports("numapin.plan.gpus")  # for types only
    assert "os" in _imports("numapin.topology.discover")
    names = {*PURE, *chain(*ONLY_IN.values()), *chain(*LAYERS)}
    assert [name for name in names if not any(_within(module, (name,)) for module in MODULES)] == []


def test_pure_modules_import_nothing_that_acts() -> None:
    """Modules that decide neither read nor write: no os, pathlib, subprocess, or library that looks at hardware.

    They import only pure modules of ours, so that nothing acts through a back door.
    """
    for module in (module for module in MODULES if _within(module, PURE)):
        assert not {imported.partition(".")[0] for imported in _imports(module, at_run_time=False)} & IMPURE, module
        ours = {imported for imported in _imports(module) if imported.startswith("numapin.")}
        assert {imported for imported in ours if not _within(imported, PURE)} == set(), module


def test_libraries_have_one_place() -> None:
    """pynvml, ctypes, numa, torch, click and rich are each imported where the design says and nowhere else."""
    for module in MODULES:
        for imported in {name.partition(".")[0] for name in _imports(module, at_run_time=False)} & ONLY_IN.keys():
            assert _within(module, ONLY_IN[imported]), f"{module} imports {imported}"


def test_folders_import_downwards() -> None:
    """A module imports from its own folder and lower ones, for types too; the hook is a program of its own."""
    for module in (module for module in MODULES if module != "numapin" and not module.startswith("numapin.rank.hook.")):
        own = module.split(".")[1]
        (layer,) = [number for number, names in enumerate(LAYERS) if own in names]
        lower = {name for names in LAYERS[: layer or 1] for name in names}
        used = {name.split(".")[1] for name in _imports(module, at_run_time=False) if name.startswith("numapin.")}
        assert used - lower - {own} == set(), module


def test_a_folder_lists_its_modules() -> None:
    """The docstring of each package has a line for each module and folder in it."""
    for folder in [path.parent for path in MODULES.values() if path.name == "__init__.py"][1:]:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        listed = {line.split()[0].removesuffix("/") for line in text.partition("::\n")[2].splitlines() if line.strip()}
        files = {path.name for path in folder.iterdir() if path.suffix in (".py", ".c")}
        assert listed == files - {"__init__.py"} | {path.parent.name for path in folder.glob("*/*.py")}, folder


def test_there_is_no_import_cycle() -> None:
    """Modules can be put in an order in which each imports only earlier ones."""
    left = {m: {i for i in _imports(m) if i in MODULES and i != m} - {"numapin"} for m in MODULES if m != "numapin"}
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert left == {}


def test_a_class_name_has_one_meaning() -> None:
    """Each class name exists once in the package."""
    nodes = (node for module in MODULES for node in ast.walk(_tree(module)))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert len(names) > 200
    assert [name for name, number in names.items() if number > 1] == []


def test_a_variable_that_hides_gpus_has_one_place() -> None:
    """Its name is a string in topology/vendors.py only; torch itself uses CUDA's, for --virtual-local-rank."""
    names = set(hiding_variables())
    nodes = ((module, node) for module in MODULES for node in ast.walk(_tree(module)) if isinstance(node, ast.Constant))
    places = {(module, node.value) for module, node in nodes if node.value in names}
    torchs = {(f"numapin.{module}", "CUDA_VISIBLE_DEVICES") for module in ("launch", "cli.run")}
    assert places == {("numapin.topology.vendors", name) for name in names} | torchs


def test_nothing_happens_at_import() -> None:
    """No statement of a module itself reads the environment, opens a file, loads a library or sets up logging."""
    effects = {"open", "os.getenv", "os.environ.get", "ctypes.CDLL", "CDLL", "logging.basicConfig", "Path.home"}
    for module in MODULES:
        for node in _tree(module).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                called = {ast.unparse(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
                assert not called & effects, module
