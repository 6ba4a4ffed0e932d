"""`read_nvml` in a process of its own, with the real pynvml and the stand-in library that it loads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.nvml.fake import FakeGpu, render
from tests.unit.topology.seam import CpuSet, LinkKind, Mig, NvmlReading, NvmlReadings, Pcie

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.nvml.fake import FakeNvml

_SAMPLE = Path(__file__).parents[2] / "nvml" / "h200-x2-vm.nvml"
_READ = (
    "import pickle, sys; "
    "from numapin.topology.sources.nvml import read_nvml; pickle.dump(read_nvml(), sys.stdout.buffer)"
)
_SEE = "check with: nvidia-smi"


def _read_in(environ: Mapping[str, str]) -> NvmlReadings:
    """Return what `read_nvml` returns in a new process; warnings and words on stderr fail the test."""
    command = [sys.executable, "-W", "error", "-c", _READ]
    child = subprocess.run(command, env=dict(environ), capture_output=True, check=False)
    assert (child.returncode, child.stderr) == (0, b"")
    result = pickle.loads(child.stdout)  # noqa: S301 - written by the line above
    assert isinstance(result, NvmlReadings)
    return result


def _read(
    fake_nvml: FakeNvml, folder: Path, gpus: Sequence[FakeGpu], *, fails: Mapping[str, int] | None = None
) -> NvmlReadings:
    return _read_in(fake_nvml.environment(folder, render(gpus, fails=fails)))


def _calls(folder: Path) -> Counter[str]:
    return Counter((folder / "calls").read_text(encoding="utf-8").split())


def _gpu(index: int) -> FakeGpu:
    """Make GPU `index` of an eight-GPU machine with two nodes of 64 CPUs, NVML's order not that of the bus."""
    node = index // 4
    return FakeGpu(
        uuid=f"GPU-{index}0000000-0000-0000-0000-000000000000",
        pci=f"00000000:{'1B2C3D4E9FAABBCC'[2 * index : 2 * index + 2]}:00.0",
        cpus=frozenset(range(64 * node, 64 * node + 64)),
        memory_nodes=frozenset({node}),
        pcie=(4, 16, 5, 16),
        nvlinks=("switch",) * 18,
    )


def _pair(first: FakeGpu, second: FakeGpu, level: int) -> list[FakeGpu]:
    return [replace(first, ancestors={1: level}), second]


class TestAnswers:
    """GPUs that answer."""

    def test_eight_gpus(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """Every value of every GPU is read, and every pair behind NVSwitches is linked by all its NVLinks."""
        result = _read(fake_nvml, tmp_path, [_gpu(index) for index in range(8)])
        assert result.notes == ()
        assert result.gpus is not None
        assert result.gpus[5] == NvmlReading(
            index=5,
            uuid="GPU-50000000-0000-0000-0000-000000000000",
            pci="0000:aa:00.0",
            name="NVIDIA H100 80GB HBM3",
            memory_nodes=CpuSet({1}),
            cpus=CpuSet(range(64, 128)),
            pcie=Pcie(gen=4, width=16, max_gen=5, max_width=16),
        )
        assert [gpu.index for gpu in result.gpus] == list(range(8))
        assert result.links == tuple((a, b, "NV18") for a, b in combinations(range(8), 2))

    def test_real_machine(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """The recorded answers of two real H200s are read as they were there."""
        result = _read_in(fake_nvml.environment(tmp_path, _SAMPLE.read_text(encoding="utf-8")))
        assert result.gpus is not None
        assert [gpu.pci for gpu in result.gpus] == ["0000:00:06.0", "0000:00:07.0"]
        assert {(gpu.memory_nodes, gpu.cpus) for gpu in result.gpus} == {(frozenset({0}), frozenset(range(32)))}
        assert result.links == ((0, 1, "NV18"),)

    @pytest.mark.parametrize("mode", [True, False, None])
    def test_persistence_mode(self, fake_nvml: FakeNvml, tmp_path: Path, *, mode: bool | None) -> None:
        """On, off, or unknown."""
        result = _read(fake_nvml, tmp_path, [replace(_gpu(0), persistence=mode)])
        assert result.gpus is not None
        assert result.gpus[0].persistence is mode

    def test_no_gpus(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """A driver without GPUs is an empty list, not a missing one."""
        assert _read(fake_nvml, tmp_path, []) == NvmlReadings(gpus=(), driver="580.159.04")

    def test_high_and_sparse_numbers(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """CPU ids far above the number of CPUs, and the node ids of GPU memory, are not lost."""
        cpus, nodes = frozenset({0, 63, 64, 8191}), frozenset({8, 255, 1023})
        result = _read(fake_nvml, tmp_path, [replace(_gpu(0), cpus=cpus, memory_nodes=nodes, numa_node=255)])
        assert result.gpus is not None
        assert (result.gpus[0].cpus, result.gpus[0].memory_nodes, result.gpus[0].own_node) == (cpus, nodes, 255)

    def test_mig_instances(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """Instances are read with UUID and name, across holes in their numbers."""
        mig = ((0, "MIG-a", "NVIDIA H100 MIG 3g.40gb"), (5, "MIG-b", "NVIDIA H100 MIG 1g.10gb"))
        result = _read(fake_nvml, tmp_path, [replace(_gpu(0), mig_mode=True, mig=mig), _gpu(1)])
        assert result.gpus is not None
        assert result.gpus[0].mig == tuple(Mig(uuid=uuid, name=name) for _, uuid, name in mig)
        assert result.gpus[1].mig == ()
        assert result.notes == ()

    def test_mig_mode_without_instances(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """CUDA cannot use a GPU in MIG mode without instances; a note says so, with the remedy."""
        result = _read(fake_nvml, tmp_path, [_gpu(0), replace(_gpu(1), mig_mode=True)])
        what = "GPU 1 is in MIG mode but has no instances, so CUDA cannot use it"
        assert result.notes == (f"{what}; leave MIG mode with: nvidia-smi -i 1 -mig 0",)


class TestLinks:
    """Links between pairs of GPUs."""

    def test_direct_nvlink(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """NVLinks between two GPUs are counted for each pair; inactive ones and those to a CPU are not."""
        a, b, c = (_gpu(index).pci for index in range(3))
        ends = [(b, b, c, "off", "npu"), (a, "off", a, "npu", "npu"), ("npu", a, "off", "npu", "npu")]
        gpus = [replace(_gpu(index), nvlinks=links, ancestors={2: 50}) for index, links in enumerate(ends)]
        assert _read(fake_nvml, tmp_path, gpus).links == ((0, 1, "NV2"), (0, 2, "NV1"), (1, 2, "SYS"))

    def test_switch_links_count_as_the_fewer(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """Between GPUs with unequal numbers of links to NVSwitches, the smaller one is the link."""
        gpus = _pair(replace(_gpu(0), nvlinks=("switch",) * 12 + ("off",) * 6), _gpu(1), 30)
        assert _read(fake_nvml, tmp_path, gpus).links == ((0, 1, "NV12"),)

    @pytest.mark.parametrize(
        ("level", "word"),
        [
            (0, LinkKind.SAME_BOARD),
            (10, LinkKind.ONE_SWITCH),
            (20, LinkKind.SWITCHES),
            (30, LinkKind.HOST_BRIDGE),
            (40, LinkKind.SAME_NODE),
            (50, LinkKind.SYSTEM),
        ],
    )
    def test_pci(self, fake_nvml: FakeNvml, tmp_path: Path, level: int, word: LinkKind) -> None:
        """Without NVLink between them, GPUs are linked as PCI devices are."""
        gpus = _pair(replace(_gpu(0), nvlinks=()), replace(_gpu(1), nvlinks=("off", "off")), level)
        assert _read(fake_nvml, tmp_path, gpus).links == ((0, 1, word),)

    @pytest.mark.parametrize("gpus", [[_gpu(0), _gpu(1)], _pair(_gpu(0), _gpu(1), 35)])
    def test_unknown(self, fake_nvml: FakeNvml, tmp_path: Path, gpus: list[FakeGpu]) -> None:
        """A pair whose relation is unknown to NVML, or has a value unknown to us, has no link."""
        gpus = [replace(gpu, nvlinks=()) for gpu in gpus]
        assert _read(fake_nvml, tmp_path, gpus).links == ()


class TestSilence:
    """Queries that fail: each leaves one value unknown."""

    def test_everything_unsupported(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """A GPU that reports only its identity is kept, with all else unknown."""
        bare = FakeGpu(uuid="GPU-a", pci="00000000:1B:00.0", name=None, pcie=None, mig_mode=None)
        result = _read(fake_nvml, tmp_path, [bare])
        bare_reading = NvmlReading(index=0, uuid="GPU-a", pci="0000:1b:00.0")
        assert result == NvmlReadings(gpus=(bare_reading,), driver="580.159.04")

    @pytest.mark.parametrize(
        ("question", "unknown"),
        [
            ("name", {"name": None}),
            ("cpus", {"cpus": None}),
            ("memory", {"memory_nodes": None}),
            ("numa_node", {"own_node": None}),
            ("pcie", {"pcie": Pcie()}),
            ("mig_mode", {"mig": ()}),
            ("mig", {"mig": ()}),
        ],
    )
    def test_one_question_refused(
        self, fake_nvml: FakeNvml, tmp_path: Path, question: str, unknown: dict[str, Any]
    ) -> None:
        """Any error except a lost GPU makes one value unknown and leaves the others."""
        whole = replace(_gpu(0), numa_node=8, mig_mode=True, mig=((0, "MIG-a", "x"),), nvlinks=())
        refusing = [replace(whole, fails={question: code}) for code in (3, 4, 13, 999)]
        gpus = _read(fake_nvml, tmp_path, [whole, *refusing]).gpus
        assert gpus is not None
        assert gpus[1:] == tuple(replace(gpus[0], index=index, **unknown) for index in range(1, 5))
        assert gpus[1] != replace(gpus[0], index=1)

    def test_no_node_of_its_own(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """Node -1 means that its memory is not a node."""
        result = _read(fake_nvml, tmp_path, [replace(_gpu(0), numa_node=-1)])
        assert result.gpus is not None
        assert result.gpus[0].own_node is None

    def test_empty_affinity(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """Masks without a bit, as under a cpuset that excludes the GPU's node, are unknown and not empty."""
        result = _read(fake_nvml, tmp_path, [replace(_gpu(0), cpus=frozenset(), memory_nodes=frozenset())])
        assert result.gpus is not None
        assert (result.gpus[0].cpus, result.gpus[0].memory_nodes) == (None, None)

    def test_old_driver(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """Functions that the library lacks leave their values unknown; direct NVLinks are still counted."""
        gpus = [replace(_gpu(0), numa_node=8, nvlinks=(_gpu(1).pci,) * 6), replace(_gpu(1), nvlinks=(_gpu(0).pci,) * 6)]
        result = _read_in(fake_nvml.environment(tmp_path, render(gpus), old=True))
        assert result.gpus is not None
        assert {(gpu.memory_nodes, gpu.own_node) for gpu in result.gpus} == {(None, None)}
        assert result.gpus[0].cpus == frozenset(range(64))
        assert result.links == ((0, 1, "NV6"),)
        assert result.notes == ()


class TestLostGpus:
    """GPUs that do not answer: each is left out."""

    @pytest.mark.parametrize("question", ["handle", "any", "pci", "cpus", "mig_mode", "nvlink"])
    def test_lost(self, fake_nvml: FakeNvml, tmp_path: Path, question: str) -> None:
        """A GPU that falls off the bus is left out with a note; the others keep their indices and links."""
        gpus = [_gpu(index) for index in range(4)]
        gpus[2] = replace(gpus[2], fails={question: 15})
        result = _read(fake_nvml, tmp_path, gpus)
        assert result.gpus is not None
        assert [gpu.index for gpu in result.gpus] == [0, 1, 3]
        assert result.links == ((0, 1, "NV18"), (0, 3, "NV18"), (1, 3, "NV18"))
        assert result.notes == (f"GPU 2 (in NVML's order) is left out: GPU is lost; {_SEE}",)

    @pytest.mark.parametrize(("question", "code"), [("handle", 4), ("uuid", 999), ("pci", 3)])
    def test_nameless(self, fake_nvml: FakeNvml, tmp_path: Path, question: str, code: int) -> None:
        """A GPU that may not be opened, or does not report its identity, cannot be used and is left out."""
        result = _read(fake_nvml, tmp_path, [replace(_gpu(0), fails={question: code}), _gpu(1)])
        assert result.gpus is not None
        assert [gpu.index for gpu in result.gpus] == [1]
        assert result.notes[0].startswith("GPU 0 (in NVML's order) is left out: ")

    def test_lost_between_two_questions(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """A GPU that is lost while pairs are compared only lacks that link."""
        gpus = [replace(gpu, nvlinks=()) for gpu in _pair(_gpu(0), _gpu(1), 50)]
        gpus[0] = replace(gpus[0], fails={"ancestor": 15})
        result = _read(fake_nvml, tmp_path, gpus)
        assert result.gpus is not None
        assert len(result.gpus) == 2
        assert result.links == ()

    def test_strange_address(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """A GPU with a malformed PCI address is left out."""
        result = _read(fake_nvml, tmp_path, [replace(_gpu(0), pci="nowhere")])
        assert (result.gpus, len(result.notes)) == ((), 1)


class TestNoNvml:
    """An NVML that does not start."""

    @pytest.mark.parametrize(
        ("code", "words", "remedy"),
        [
            (4, "Insufficient Permissions", "let this user read and write /dev/nvidiactl and /dev/nvidia0, "),
            (9, "Driver Not Loaded", "load the driver: modprobe nvidia"),
            (18, "RM has detected an NVML/RM version mismatch", "the driver was updated under the running kernel "),
            (999, "Unknown Error", _SEE),
            (77, "An error that the fake NVML was told", _SEE),
        ],
    )
    def test_failed_start(self, fake_nvml: FakeNvml, tmp_path: Path, code: int, words: str, remedy: str) -> None:
        """Each failure gives no GPU list, and a note with NVML's error text and the remedy."""
        result = _read(fake_nvml, tmp_path, [_gpu(0)], fails={"init": code})
        assert (result.gpus, result.links, len(result.notes)) == (None, (), 1)
        assert result.broken == (code != 9)
        assert result.notes[0].startswith(f"NVML did not start: {words}; {remedy}")

    def test_uncounted(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """An NVML that starts but cannot count GPUs gives no GPU list either, and is shut down."""
        result = _read(fake_nvml, tmp_path, [_gpu(0)], fails={"count": 999})
        assert result == NvmlReadings(
            gpus=None, broken=True, notes=(f"NVML cannot count the GPUs: Unknown Error; {_SEE}",)
        )
        assert _calls(tmp_path)["nvmlShutdown"] == 1

    def test_missing_library(self, tmp_path: Path) -> None:
        """Without a libnvidia-ml.so.1 that can be loaded, the note says so and what to install."""
        (tmp_path / "libnvidia-ml.so.1").write_text("no library at all", encoding="utf-8")
        result = _read_in({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
        if result.gpus is not None:
            pytest.skip("this machine has a real NVML, which the loader takes where the first one is broken")
        assert (result.gpus, len(result.notes)) == (None, 1)
        assert result.notes[0].startswith("NVML could not be loaded: no libnvidia-ml.so.1; install the NVIDIA ")

    def test_missing_pynvml(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """Without pynvml there is no GPU list, and the note says what to install."""
        (tmp_path / "pynvml.py").write_text("raise ImportError('no pynvml')", encoding="utf-8")
        result = _read_in(fake_nvml.environment(tmp_path, render([_gpu(0)])) | {"PYTHONPATH": str(tmp_path)})
        assert result.gpus is None
        assert result.notes[0].endswith("type: pip install nvidia-ml-py")


class TestManners:
    """The calls that NVML receives."""

    @pytest.mark.parametrize("fails", [{}, {"any": 15}, {"cpus": 3}, {"handle": 4}])
    def test_every_start_is_shut_down(self, fake_nvml: FakeNvml, tmp_path: Path, fails: dict[str, int]) -> None:
        """NVML is started once and shut down once, last, whatever its GPUs answer."""
        _read(fake_nvml, tmp_path, [replace(_gpu(0), fails=fails)])
        calls = (tmp_path / "calls").read_text(encoding="utf-8").split()
        assert (calls[0], calls[-1]) == ("nvmlInitWithFlags", "nvmlShutdown")
        assert (calls.count("nvmlInitWithFlags"), calls.count("nvmlShutdown")) == (1, 1)

    def test_failed_start_is_not_shut_down(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """An NVML that did not start is not shut down."""
        _read(fake_nvml, tmp_path, [], fails={"init": 18})
        assert _calls(tmp_path) == {"nvmlInitWithFlags": 1}

    def test_questions_are_few(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """NVLink ends are queried once per link, not once per pair, and PCI relations only for pairs without NVLink."""
        _read(fake_nvml, tmp_path, [_gpu(index) for index in range(8)])
        calls = _calls(tmp_path)
        assert calls["nvmlDeviceGetNvLinkState"] <= 8 * 19  # the nineteenth says that there is none
        assert calls["nvmlDeviceGetNvLinkRemotePciInfo_v2"] == 0
        assert calls["nvmlDeviceGetTopologyCommonAncestor"] == 0
        assert calls["nvmlDeviceGetMaxMigDeviceCount"] == 0
        assert calls["nvmlDeviceGetCpuAffinity"] == 8

    def test_importing_does_not_load_nvml(self) -> None:
        """The module is imported without pynvml, and so without the driver."""
        code = "import sys, numapin.topology.sources.nvml; sys.exit('pynvml' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestStandIn:
    """The stand-in itself."""

    def test_torch_counts_its_gpus(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """The NVML calls of torch, through ctypes and other names of the same functions, are answered."""
        code = """if True:
            from ctypes import CDLL, byref, c_int, c_void_p, create_string_buffer
            nvml, count, gpu, uuid = CDLL("libnvidia-ml.so.1"), c_int(), c_void_p(), create_string_buffer(96)
            print(nvml.nvmlDeviceGetCount_v2(byref(count)), nvml.nvmlInit(), nvml.nvmlDeviceGetCount_v2(byref(count)))
            nvml.nvmlDeviceGetHandleByIndex_v2(count.value - 1, byref(gpu))
            print(count.value, nvml.nvmlDeviceGetUUID(gpu, uuid, 96), uuid.value.decode())
        """
        environ = fake_nvml.environment(tmp_path, render([_gpu(0), _gpu(1)]))
        child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert child.stdout == "1 0 0\n2 0 GPU-10000000-0000-0000-0000-000000000000\n"

    def test_a_line_it_cannot_read_is_named(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """A mistake in a data file is an error, not an unanswered query."""
        environ = fake_nvml.environment(tmp_path, "gpu\ncpus zz\n")
        child = subprocess.run([sys.executable, "-c", _READ], env=environ, capture_output=True, check=True)
        assert b"cannot read this line of FAKE_NVML_DATA: cpus zz" in child.stderr
