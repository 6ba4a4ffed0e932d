"""Build the stand-in NVML and write its data files.

`fake_nvml.c` says what it answers and describes the data file. Only the standard library is used here, so that tests in
virtual machines can take this file along.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("fake_nvml.c")
_NO_GPUS: Final = ("switch", "npu", "off")  # other far ends of an NVLink
_FLAGS: Final = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """A GPU as the stand-in reports it; the answer for None, or for an empty set, is NOT_SUPPORTED.

    `pcie` is generation and width now, then at most. `mig` are (number, UUID, name). `nvlinks` are far ends, one a
    link: "switch", "npu", "off", or the PCI address of a GPU. `load` is how busy, in percent, and what is received
    over PCIe in kB/s. `vram` is memory in use and in all, in MiB; `power` is in milliwatts. `processes` are process
    ids, or these with the memory in MiB. `ecc`, `rows`, `retirement` and `reasons` are as in the data file.
    `ancestors` maps later GPUs to nvmlGpuTopologyLevel_t.
    `fails` maps questions (the words of the data file) to the nvmlReturn_t that refuses them.
    """

    uuid: str
    pci: str
    name: str | None = "NVIDIA H100 80GB HBM3"
    cpus: frozenset[int] | None = None
    memory_nodes: frozenset[int] | None = None
    numa_node: int | None = None
    pcie: tuple[int, int, int, int] | None = (5, 16, 5, 16)
    mig_mode: bool | None = False
    persistence: bool | None = None
    load: tuple[int, int] | None = None
    vram: tuple[int, int] | None = None
    power: int | None = None
    processes: tuple[int | tuple[int, int], ...] = ()
    ecc: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None
    retirement: int | None = None
    reasons: int | None = None
    mig: tuple[tuple[int, str, str], ...] = ()
    nvlinks: tuple[str, ...] = ()
    ancestors: Mapping[int, int] = field(default_factory=dict)
    fails: Mapping[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        masks = {"cpus": _mask(self.cpus), "memory": _mask(self.memory_nodes)}
        reasons = None if self.reasons is None else f"{self.reasons:x}"
        words = ("uuid", "pci", "name", "numa_node", "pcie", "mig_mode", "persistence", "load", "vram", "power")
        told = {word: getattr(self, word) for word in (*words, "ecc", "rows", "retirement")}
        values = {**told, **masks, "reasons": reasons}
        return [
            "gpu",
            *(f"{word} {_words(value)}" for word, value in values.items() if value is not None),
            *(f"process {_words(each)}" for each in self.processes),
            *(f"mig {_words(each)}" for each in self.mig),
            *(f"nvlink {link} {'' if end in _NO_GPUS else 'gpu '}{end}" for link, end in enumerate(self.nvlinks)),
            *(f"ancestor {other} {level}" for other, level in self.ancestors.items()),
            *(f"fail {question} {code}" for question, code in self.fails.items()),
        ]


def _words(value: object) -> str:
    """Return the words of a value or of several; a boolean is 0 or 1."""
    return (
        " ".join(map(str, value)) if isinstance(value, tuple) else str(int(value) if isinstance(value, bool) else value)
    )


def render(gpus: Sequence[FakeGpu], *, fails: Mapping[str, int] | None = None) -> str:
    """Render a data file; `fails` maps "init" and "count" to the nvmlReturn_t that refuses them."""
    machine = ["driver 580.159.04", *(f"fail {question} {code}" for question, code in (fails or {}).items())]
    return "".join(f"{line}\n" for line in [*machine, *(line for gpu in gpus for line in gpu.lines())])


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, *, old: bool = False) -> Path:
    """Compile the stand-in below `folder`, unless it is there already, and return the library's path.

    `old` leaves out the functions that old drivers lack. The library lies in a folder of its own, fit for
    LD_LIBRARY_PATH, that is named by what it was made from. Raises CalledProcessError with the compiler's words.
    """
    flags = (*_FLAGS, *(("-DOLD_NVML",) if old else ()))
    made_from = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    library = folder / made_from / "libnvidia-ml.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        scratch = library.with_name(f"{os.getpid()}.so")  # renamed when whole: tests in parallel build it at once
        subprocess.run([compiler() or "cc", *flags, "-o", str(scratch), str(SOURCE)], check=True)
        scratch.replace(library)
    return library


def environment(library: Path, data: Path, *, log: Path | None = None) -> dict[str, str]:
    others = os.environ.get("LD_LIBRARY_PATH")
    environ = {**os.environ, "FAKE_NVML_DATA": str(data)}
    environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(library.parent), *([others] if others else [])])
    return environ if log is None else {**environ, "FAKE_NVML_LOG": str(log)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeNvml:
    library: Path
    old_library: Path

    def environment(self, folder: Path, data: str, *, old: bool = False) -> dict[str, str]:
        path = folder / "nvml-data"
        path.write_text(data, encoding="utf-8")
        return environment(self.old_library if old else self.library, path, log=folder / "calls")


def _mask(numbers: Iterable[int] | None) -> str | None:
    """Return hexadecimal 64-bit words, lowest first; the empty set is one word of zeros."""
    if numbers is None:
        return None
    value = sum(1 << number for number in numbers)
    words = range(max(1, -(-value.bit_length() // 64)))
    return " ".join(f"{value >> 64 * word & (1 << 64) - 1:x}" for word in words)
