"""The machine's GPUs as the fake NVML reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.nvml import fake
from tests.vm.machine import VmMachine

if TYPE_CHECKING:
    from pathlib import Path


def uuid(index: int) -> str:
    """Return the UUID of a GPU."""
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def shown(name: str, library: Path) -> dict[str, str]:
    """Return the environment in which NVML reports the machine's GPUs, in the order of its file."""
    gpus = [fake.FakeGpu(uuid=uuid(i), pci=f"0000{gpu.address}") for i, gpu in enumerate(VmMachine.load(name).gpus)]
    data = library.with_name(f"{name}.nvml")
    data.write_text(fake.render(gpus))
    return {"FAKE_NVML_DATA": str(data)}
