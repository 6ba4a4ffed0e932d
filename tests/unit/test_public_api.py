"""The names that users import: exactly these, lazily."""

from __future__ import annotations

import subprocess
import sys

import pytest

import numapin

NAMES = [
    *("discover", "Topology", "Package", "Node", "Core", "Gpu", "Nic", "Link", "Allowed"),
    *("make_plan", "Request", "Bind", "Memory", "Plan", "RankPlan"),
    *("spawn", "bind_this_process", "ProcessBinding", "DataLoader", "StatefulDataLoader"),
    *("batch_buffer", "pack_bytes", "share"),
    *("NumapinError", "UsageError", "MachineError", "MachineFileError", "LibnumaError"),
    *("PlanError", "BindingRefused", "RankError"),
]
MODULES = ["pinned"]


def test_exported_names_are_the_intended_ones() -> None:
    """A name is added to or taken from the public API on purpose only."""
    assert sorted(numapin.__all__) == sorted([*NAMES, *MODULES])
    assert dir(numapin) == sorted([*NAMES, *MODULES, "__version__"])


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_imported(name: str) -> None:
    """Each lazy name leads to the thing of that name in one of our modules, with a docstring."""
    value = getattr(numapin, name)
    assert value.__name__ == name
    assert value.__module__.startswith("numapin.")
    assert value.__doc__


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_there_without_an_import_of_its_own(name: str) -> None:
    """`import numapin` is enough for `numapin.pinned.empty(…)`: in a new interpreter, where nothing imported it yet."""
    code = f"import numapin; print(numapin.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"numapin.{name}\n", "")


def test_other_names_are_attribute_errors() -> None:
    """A typo fails as in any module."""
    with pytest.raises(AttributeError, match="module 'numapin' has no attribute 'maek_plan'"):
        numapin.maek_plan  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    "statement",
    [
        "import numapin",
        "from numapin import discover, make_plan",
        "from numapin import pinned",
        "from numapin import make_plan, Request; import numapin; assert numapin.__version__",
    ],
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    """Neither torch nor pynvml nor numa is loaded before it is needed."""
    code = (
        f"{statement}\nimport sys; print(sorted({{'torch', 'pynvml', 'numa', 'click', 'rich'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)
