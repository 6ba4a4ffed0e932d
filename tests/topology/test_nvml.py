"""`read_nvml` in a process of its own, with the real pynvml and the stand-in library that it loads.

Every case of CASES has the recorded readings: nvml.txt, which NUMAPIN_UPDATE_GOLDEN=1 writes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.nvml.fake import FakeGpu, render
from tests.recorded.screens import compare
from tests.topology.seam import NvmlReading, NvmlReadings

if TYPE_CHECKING:
    from tests.nvml.fake import FakeNvml

_SAMPLE = Path(__file__).parents[1] / "nvml" / "h200-x2-vm.nvml"
# Reads once, or with each data file and log of calls of which standard input has the paths.
_READ = """if True:
    import os, pickle, sys
    from numapin.topology.sources.nvml import read_nvml
    found = []
    for line in sys.stdin.read().splitlines() or [""]:
        if line:
            os.environ["FAKE_NVML_DATA"], os.environ["FAKE_NVML_LOG"] = line.split()
        found.append(read_nvml())
    pickle.dump(found, sys.stdout.buffer)
"""
_QUESTIONS = ("name", "cpus", "memory", "numa_node", "pcie", "mig_mode", "mig")


def _gpu(index: int, **changes: Any) -> FakeGpu:
    """Make GPU `index` of an eight-GPU machine with two nodes of 64 CPUs, NVML's order not that of the bus."""
    node = index // 4
    usual = FakeGpu(
        uuid=f"GPU-{index}0000000-0000-0000-0000-000000000000",
        pci=f"00000000:{'1B2C3D4E9FAABBCC'[2 * index : 2 * index + 2]}:00.0",
        cpus=frozenset(range(64 * node, 64 * node + 64)),
        memory_nodes=frozenset({node}),
        pcie=(4, 16, 5, 16),
        nvlinks=("switch",) * 18,
    )
    return replace(usual, **changes)


def _pair(level: int, *, first: Sequence[str] = (), second: Sequence[str] = ("off", "off"), **changes: Any) -> str:
    """Return two GPUs with these ends of NVLinks, which are at this level of NVML's tree."""
    gpus = _gpu(0, ancestors={1: level}, nvlinks=tuple(first), **changes), _gpu(1, nvlinks=tuple(second))
    return render(gpus)


def _one(**changes: Any) -> str:
    return render([_gpu(0, **changes)])


def _lost(question: str, code: int, *, num_gpus: int = 4, at: int = 2) -> str:
    return render([_gpu(index, fails={question: code} if index == at else {}) for index in range(num_gpus)])


A, B, C = (_gpu(index).pci for index in range(3))
_WHOLE: Final = {"numa_node": 8, "mig_mode": True, "mig": ((0, "MIG-a", "x"),), "nvlinks": ()}
CASES: Final = {
    "every value of eight GPUs, each pair linked by all NVLinks to the switches": render([_gpu(i) for i in range(8)]),
    "two real H200s": _SAMPLE.read_text(encoding="utf-8"),
    "persistence mode is on, off, or unknown": render(
        [_gpu(index, persistence=mode) for index, mode in enumerate((True, False, None))]
    ),
    "a driver without GPUs is an empty list, not a missing one": render([]),
    "high CPU ids and the node ids of GPU memory are not lost": _one(
        cpus=frozenset({0, 63, 64, 8191}), memory_nodes=frozenset({8, 255, 1023}), numa_node=255
    ),
    "MIG instances have UUID and name, across holes in their numbers": render(
        [_gpu(0, mig_mode=True, mig=((0, "MIG-a", "NVIDIA H100 MIG 3g.40gb"), (5, "MIG-b", "NVIDIA 1g.10gb"))), _gpu(1)]
    ),
    "CUDA cannot use a GPU in MIG mode without instances": render([_gpu(0), _gpu(1, mig_mode=True)]),
    "NVLinks between two GPUs are counted for each pair; inactive ones and those to a CPU are not": render(
        [
            _gpu(index, nvlinks=ends, ancestors={2: 50})
            for index, ends in enumerate([(B, B, C, "off", "npu"), (A, "off", A, "npu", "npu"), ("npu", A, "off")])
        ]
    ),
    "between GPUs with unequal numbers of links to switches, the smaller one is the link": _pair(
        30, first=("switch",) * 12 + ("off",) * 6, second=("switch",) * 18
    ),
    **{f"GPUs without NVLink are linked as PCI devices are: level {n}": _pair(n) for n in range(0, 60, 10)},
    "a pair at a level unknown to us has no link": _pair(35),
    "a pair whose relation is unknown to NVML has no link": render([_gpu(0, nvlinks=()), _gpu(1, nvlinks=())]),
    "a GPU that reports only its identity has all else unknown": render(
        [FakeGpu(uuid="GPU-a", pci="00000000:1B:00.0", name=None, pcie=None, mig_mode=None)]
    ),
    **{
        f"any error but a lost GPU leaves one value unknown: {question}": render(
            [_gpu(0, **_WHOLE), *(_gpu(n, **_WHOLE, fails={question: code}) for n, code in enumerate((3, 999), 1))]
        )
        for question in _QUESTIONS
    },
    "node -1: the memory is not a node": _one(numa_node=-1),
    "masks without a bit, as under a cpuset, are unknown and not empty": _one(
        cpus=frozenset(), memory_nodes=frozenset()
    ),
    **{
        f"a lost GPU is left out; the others keep their indices and links: {question}": _lost(question, 15)
        for question in ("handle", "any", "pci", "cpus", "mig_mode", "nvlink")
    },
    **{
        f"a GPU that may not be opened, or does not report its identity, is left out: {question}": _lost(
            question, code, num_gpus=2, at=0
        )
        for question, code in (("handle", 4), ("uuid", 999), ("pci", 3))
    },
    "a GPU that is lost while pairs are compared only lacks that link": _pair(50, fails={"ancestor": 15}),
    "a GPU with a malformed PCI address is left out": _one(pci="nowhere"),
    **{f"NVML does not start: {n}": render([_gpu(0)], fails={"init": n}) for n in (4, 9, 18, 999, 77)},
    "NVML starts but cannot count GPUs": render([_gpu(0)], fails={"count": 999}),
}
OLD: Final = "functions that an old driver lacks leave their values unknown; direct NVLinks are still counted"


def _read_in(environ: Mapping[str, str]) -> NvmlReadings:
    (found,) = _read_each(environ)
    return found


def _read_each(environ: Mapping[str, str], *files: str) -> list[NvmlReadings]:
    """Return what it returns with each data file and log; warnings and words on stderr fail the test."""
    command = [sys.executable, "-W", "error", "-c", _READ]
    child = subprocess.run(
        command, env=dict(environ), input="\n".join(files).encode(), capture_output=True, check=False
    )
    assert (child.returncode, child.stderr) == (0, b"")
    results: list[NvmlReadings] = pickle.loads(child.stdout)  # noqa: S301 - written by the line above
    return results


def _described(readings: NvmlReadings) -> Iterator[str]:
    usual = NvmlReading(index=-1, uuid=None, pci="")
    yield f"driver {readings.driver}, {'no list of GPUs' if readings.gpus is None else f'{len(readings.gpus)} GPUs'}"
    yield from ["broken"] if readings.broken else []
    for gpu in readings.gpus or ():
        values = {field.name: (getattr(gpu, field.name), getattr(usual, field.name)) for field in fields(gpu)}
        yield " ".join(f"{name}={value}" for name, (value, default) in values.items() if value != default)
    yield from (f"gpu{a}-gpu{b} {word}" for a, b, word in readings.links)
    yield from (f"note: {note}" for note in readings.notes)


def test_the_readings_of_each_case_are_the_recorded_ones(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """Every answer of NVML, and every refusal, with its note; NVML is shut down once, last, if it started."""
    of_old = render([_gpu(0, numa_node=8, nvlinks=(B,) * 6), _gpu(1, nvlinks=(A,) * 6)])
    shown = ""
    for is_old, cases in ((False, CASES), (True, {OLD: of_old})):
        folders = [tmp_path / f"{is_old}{number}" for number in range(len(cases))]
        for folder, data in zip(folders, cases.values(), strict=True):
            folder.mkdir()
            (folder / "data").write_text(data, encoding="utf-8")
        environ = fake_nvml.environment(tmp_path, "", old=is_old)
        readings = _read_each(environ, *(f"{folder}/data {folder}/calls" for folder in folders))
        for sentence, folder, found in zip(cases, folders, readings, strict=True):
            calls = (folder / "calls").read_text(encoding="utf-8").split()
            starts_and_ends = [call for call in calls if call in ("nvmlInitWithFlags", "nvmlShutdown")]
            has_started = not sentence.startswith("NVML does not start")
            assert starts_and_ends == ["nvmlInitWithFlags", "nvmlShutdown"][: 1 + has_started]
            assert calls[-1] == starts_and_ends[-1]
            shown += "\n".join((f"=== {sentence}", *_described(found), ""))
    compare(shown, str(Path(__file__).with_name("nvml.txt")))


def test_missing_library(tmp_path: Path) -> None:
    """Without a libnvidia-ml.so.1 that can be loaded, the note says so and what to install."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library at all", encoding="utf-8")
    result = _read_in({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    if result.gpus is not None:
        pytest.skip("this machine has a real NVML, which the loader takes where the first one is broken")
    assert (result.gpus, len(result.notes)) == (None, 1)
    assert result.notes[0].startswith("NVML could not be loaded: no libnvidia-ml.so.1; install the NVIDIA ")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("raise ImportError('no pynvml')", "no pynvml; type: pip install nvidia-ml-py"),
        ("", "pynvml.py is too old; type: pip uninstall pynvml && pip install --upgrade nvidia-ml-py"),
    ],
)
def test_missing_pynvml(code: str, remedy: str, fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """Without pynvml, or with an old package of that name, there is no GPU list; the note says what to install."""
    (tmp_path / "pynvml.py").write_text(code, encoding="utf-8")
    result = _read_in(fake_nvml.environment(tmp_path, render([_gpu(0)])) | {"PYTHONPATH": str(tmp_path)})
    assert result.gpus is None
    assert result.notes[0].endswith(remedy)


def test_questions_are_few(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """NVLink ends are queried once per link, not once per pair, and PCI relations only for pairs without NVLink."""
    _read_in(fake_nvml.environment(tmp_path, render([_gpu(index) for index in range(8)])))
    calls = Counter((tmp_path / "calls").read_text(encoding="utf-8").split())
    assert calls["nvmlDeviceGetNvLinkState"] <= 8 * 19  # the nineteenth says that there is none
    assert calls["nvmlDeviceGetNvLinkRemotePciInfo_v2"] == 0
    assert calls["nvmlDeviceGetTopologyCommonAncestor"] == 0
    assert calls["nvmlDeviceGetMaxMigDeviceCount"] == 0
    assert calls["nvmlDeviceGetCpuAffinity"] == 8
