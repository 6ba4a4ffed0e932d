"""numapin: a NUMA-aware launcher for multi-GPU PyTorch.

Importing this package has no effects and imports neither torch nor pynvml nor libnuma. Each public name is imported
from its module on first use. Only `DataLoader` and `StatefulDataLoader`, which are torch classes, import torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost each rank milliseconds
if TYPE_CHECKING:
    from numapin import pinned
    from numapin.children.call import ProcessBinding, bind_this_process
    from numapin.data.buffer import batch_buffer, pack_bytes
    from numapin.data.loader import DataLoader
    from numapin.data.stateful_loader import StatefulDataLoader
    from numapin.errors import (
        BindingRefused,
        LibnumaError,
        MachineError,
        MachineFileError,
        NumapinError,
        PlanError,
        RankError,
        UsageError,
    )
    from numapin.plan.make import make_plan
    from numapin.plan.model import Plan, RankPlan
    from numapin.plan.request import Bind, Memory, Request
    from numapin.sharing.call import share
    from numapin.spawning.call import spawn
    from numapin.topology.discover import discover
    from numapin.topology.model import Allowed, Core, Gpu, Node, Package, Topology
    from numapin.topology.nics import Link, Nic

__version__ = "0.1.0"

_HOME = {  # module -> its public names
    "numapin.topology.discover": ("discover",),
    "numapin.topology.model": ("Topology", "Package", "Node", "Core", "Gpu", "Allowed"),
    "numapin.topology.nics": ("Nic", "Link"),
    "numapin.plan.make": ("make_plan",),
    "numapin.plan.request": ("Request", "Bind", "Memory"),
    "numapin.plan.model": ("Plan", "RankPlan"),
    "numapin.spawning.call": ("spawn",),
    "numapin.children.call": ("bind_this_process", "ProcessBinding"),
    "numapin.data.loader": ("DataLoader",),
    "numapin.data.stateful_loader": ("StatefulDataLoader",),
    "numapin.data.buffer": ("batch_buffer", "pack_bytes"),
    "numapin.sharing.call": ("share",),
    "numapin.errors": (
        *("NumapinError", "UsageError", "MachineError", "MachineFileError", "LibnumaError", "PlanError"),
        *("BindingRefused", "RankError"),
    ),
}
_MODULES = ("pinned",)

__all__ = [  # noqa: RUF022 - grouped by stage, in the order of use
    "discover",
    "Topology",
    "Package",
    "Node",
    "Core",
    "Gpu",
    "Nic",
    "Link",
    "Allowed",
    "make_plan",
    "Request",
    "Bind",
    "Memory",
    "Plan",
    "RankPlan",
    "spawn",
    "bind_this_process",
    "ProcessBinding",
    "DataLoader",
    "StatefulDataLoader",
    "batch_buffer",
    "pack_bytes",
    "share",
    "pinned",
    "NumapinError",
    "UsageError",
    "MachineError",
    "MachineFileError",
    "LibnumaError",
    "PlanError",
    "BindingRefused",
    "RankError",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module, or a public module, on first use (PEP 562)."""
    import sys
    from importlib import import_module
    from importlib.util import find_spec

    if name in _MODULES:
        # The module itself imports without torch; its functions do not.
        if "torch" not in sys.modules and find_spec("torch") is None:
            raise _needs_torch(name)
        return import_module(f"numapin.{name}")
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        msg = f"module 'numapin' has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if name == "StatefulDataLoader" and (error.name or "").partition(".")[0] == "torchdata":
            message = "numapin.StatefulDataLoader needs torchdata: pip install 'torchdata>=0.11'"
            raise ModuleNotFoundError(message, name=error.name) from error
        if error.name != "torch":
            raise
        raise _needs_torch(name) from error


def _needs_torch(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"numapin.{name} needs torch: pip install 'numapin[torch]'", name="torch")


def __dir__() -> list[str]:
    """List the public names for completion."""
    return sorted([*__all__, "__version__"])
