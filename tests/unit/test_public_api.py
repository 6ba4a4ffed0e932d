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
IMPORTS = """
import sys, numapin
print(numapin.pinned.__name__)
from numapin import discover, make_plan, pinned, Request
assert numapin.__version__
print({'torch', 'pynvml', 'numa', 'click', 'rich'} & sys.modules.keys())
"""


def test_exported_names_are_the_intended_ones() -> None:
    """A name is added to or taken from the public API on purpose only; a typo fails as in any module."""
    assert sorted(numapin.__all__) == sorted([*NAMES, "pinned"])
    assert dir(numapin) == sorted([*NAMES, "pinned", "__version__"])
    with pytest.raises(AttributeError, match="module 'numapin' has no attribute 'maek_plan'"):
        numapin.maek_plan  # noqa: B018 - the access is the test


def test_every_name_can_be_imported() -> None:
    """Each lazy name leads to the thing of that name in one of our modules, with a docstring."""
    for name in NAMES:
        value = getattr(numapin, name)
        assert value.__name__ == name
        assert value.__module__.startswith("numapin.")
        assert value.__doc__, name


def test_importing_loads_nothing_heavy() -> None:
    """Neither torch nor pynvml nor numa is loaded before it is needed; `import numapin` is enough for its module."""
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("numapin.pinned\nset()\n", "", 0)
