"""Read the GPUs from NVML. Edge: the only importer of pynvml.

Comes in: whatever driver this host has, or none. Goes out: `NvmlReadings`, always; `build` decides what its absence
means. A question that NVML does not answer costs that one value, a GPU that does not answer costs that one GPU.

Source: the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from numapin.base import cpu_set
from numapin.system import calls
from numapin.topology.address import pci_address
from numapin.topology.model import LinkKind, Mig, Pcie
from numapin.topology.readings import GpuLoad, NvmlReading, NvmlReadings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from numapin.base.cpu_set import CpuSet

_WORD_BITS: Final = 64
# Masks hold every id that Linux can be built for (8192 CPUs, 1024 nodes): ids may be sparse (nodes go up to 255 on a
# POWER9), so that counting CPUs or nodes bounds nothing. The longer mask costs no time (2 µs on an H200).
_CPU_WORDS: Final = 8192 // _WORD_BITS
_NODE_WORDS: Final = 1024 // _WORD_BITS

_SWITCH: Final = "NVSwitch"
"""Stands for the far end of NVLinks that lead to any NVSwitch; the others are PCI addresses."""

_ANCESTORS: Final = {
    0: LinkKind.SAME_BOARD,
    10: LinkKind.ONE_SWITCH,
    20: LinkKind.SWITCHES,
    30: LinkKind.HOST_BRIDGE,
    40: LinkKind.SAME_NODE,
    50: LinkKind.SYSTEM,
}
"""nvmlGpuTopologyLevel_t in our words."""

_REMEDIES: Final = {
    4: "let this user read and write /dev/nvidiactl and /dev/nvidia0, /dev/nvidia1, …",
    9: "load the driver: modprobe nvidia",
    12: "install the NVIDIA driver, or let the container have its libnvidia-ml.so.1 (docker run --gpus all)",
    18: "the driver was updated under the running kernel module: reboot, or unload and load the nvidia modules",
}
"""By nvmlReturn_t."""

_NO_DRIVER: Final = frozenset({9, 12})
"""What NVML answers where there is no driver: "driver not loaded" and, from pynvml, "library not found"."""


class _NvmlDevice(NamedTuple):
    """One GPU that answered. `far_ends` counts its active NVLinks by where they lead."""

    handle: object
    reading: NvmlReading
    mig_mode: bool
    far_ends: Counter[str]


def read_nvml() -> NvmlReadings:
    """Read every GPU that the driver shows, and how each pair is linked.

    Starts NVML and shuts it down again; makes no CUDA context. Never raises: without NVML, `gpus` is None and a note
    names the error and its remedy; without GPUs it is empty.
    """
    if not calls.can_load("libnvidia-ml.so.1"):  # pynvml looks nowhere else, and costs 17 ms to find that out
        return NvmlReadings(gpus=None, notes=(f"NVML could not be loaded: no libnvidia-ml.so.1; {_REMEDIES[12]}",))
    try:
        import pynvml
    except ImportError as error:
        return NvmlReadings(gpus=None, notes=(f"NVML cannot be asked: {error}; type: pip install nvidia-ml-py",))
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)  # a driver without GPUs is no error
    except pynvml.NVMLError as error:
        return _silent("NVML could not be loaded" if error.value == 12 else "NVML did not start", error)
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        return _silent("NVML cannot count the GPUs", error)
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # all is read: a failed goodbye takes nothing away
            pynvml.nvmlShutdown()


@contextlib.contextmanager
def open_loads(uuids: Iterable[str]) -> Iterator[Callable[[], dict[str, GpuLoad]]]:
    """Keep NVML started; yield what reads, at each call, how busy these GPUs are: UUID -> load.

    A GPU that does not answer is left out, and all of them are where NVML does not start. Each takes 20 ms, over which
    NVML counts the bytes.
    """
    nvml = _started()
    if nvml is None:
        yield dict
        return
    try:
        handles = {uuid: handle for uuid in uuids if (handle := _handle(nvml, uuid)) is not None}
        yield lambda: {uuid: load for uuid, handle in handles.items() if (load := _load(nvml, handle)) is not None}
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _started() -> ModuleType | None:
    if not calls.can_load("libnvidia-ml.so.1"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    except pynvml.NVMLError:
        return None
    return cast("ModuleType", pynvml)


def _handle(nvml: ModuleType, uuid: str) -> object | None:
    try:
        return cast("object", nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError:
        return None


def _load(nvml: ModuleType, handle: object) -> GpuLoad | None:
    try:
        rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        # What the GPU receives is what the host sends it; NVML's unit is 1000 bytes/s.
        received = _ask(nvml, nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
    except nvml.NVMLError:
        return None
    return GpuLoad(
        busy_share=None if rates is None else rates.gpu / 100, h2d_gbps=None if received is None else received / 1e6
    )


def _silent(what: str, error: Any) -> NvmlReadings:  # noqa: ANN401 - pynvml is untyped
    remedy = _REMEDIES.get(error.value, "see what this says: nvidia-smi")
    return NvmlReadings(gpus=None, broken=error.value not in _NO_DRIVER, notes=(f"{what}: {_words(error)}; {remedy}",))


def _words(error: object) -> str:
    return str(error).rstrip(".")


def _read(nvml: ModuleType) -> NvmlReadings:
    devices, notes = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            devices.append(_device(nvml, index))
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} (in NVML's order) is left out: {_words(error)}; see what this says: nvidia-smi")
    notes += [_empty_mig_note(device.reading.index) for device in devices if device.mig_mode and not device.reading.mig]
    return NvmlReadings(
        gpus=tuple(device.reading for device in devices),
        driver=_optional_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion)),
        links=_links(nvml, devices),
        notes=tuple(notes),
    )


def _device(nvml: ModuleType, index: int) -> _NvmlDevice:
    """Read one GPU. Raises NVMLError where it is lost, or does not say who it is."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    mig_mode = bool(mode and mode[0])
    reading = _reading(nvml, index, handle)
    if mig_mode:
        reading = replace(reading, mig=tuple(_mig_instances(nvml, handle)))
    return _NvmlDevice(handle=handle, reading=reading, mig_mode=mig_mode, far_ends=_far_ends(nvml, handle))


def _reading(nvml: ModuleType, index: int, handle: object) -> NvmlReading:
    def ask(question: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - pynvml is untyped
        return _ask(nvml, question, handle, *args)

    pci = pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    if pci is None:
        raise nvml.NVMLError(nvml.NVML_ERROR_INVALID_STATE)
    own_node, persistence = ask(nvml.nvmlDeviceGetNumaNodeId), ask(nvml.nvmlDeviceGetPersistenceMode)
    return NvmlReading(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        pci=pci,
        name=_optional_text(ask(nvml.nvmlDeviceGetName)),
        memory_nodes=_mask(ask(nvml.nvmlDeviceGetMemoryAffinity, _NODE_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)),
        cpus=_mask(ask(nvml.nvmlDeviceGetCpuAffinity, _CPU_WORDS)),
        own_node=own_node if own_node is not None and own_node >= 0 else None,
        pcie=Pcie(
            gen=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
            max_gen=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
            max_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        ),
        persistence=None if persistence is None else bool(persistence),
    )


def _mig_instances(nvml: ModuleType, handle: object) -> Iterable[Mig]:
    """Yield the MIG instances; their numbers may have holes."""
    for number in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        uuid = None if instance is None else _ask(nvml, nvml.nvmlDeviceGetUUID, instance)
        if uuid is not None:
            yield Mig(uuid=_text(uuid), name=_optional_text(_ask(nvml, nvml.nvmlDeviceGetName, instance)))


def _empty_mig_note(index: int) -> str:
    off = f"nvidia-smi -i {index} -mig 0"
    return f"GPU {index} is in MIG mode but has no instances, so CUDA cannot use it; leave MIG mode with: {off}"


# --- links -----------------------------------------------------------------------------------------------------------


def _far_ends(nvml: ModuleType, handle: object) -> Counter[str]:
    far_ends: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        active = _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if active is None:  # no such link, and none above it
            break
        end = _far_end(nvml, handle, link) if active else None
        far_ends.update([end] if end else [])
    return far_ends


def _far_end(nvml: ModuleType, handle: object, link: int) -> str | None:
    # Behind an NVSwitch the PCI address is the switch's, and in a virtual machine it is often nothing at all.
    if _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return _SWITCH
    pci = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return None if pci is None else pci_address(_text(pci.busId))


def _links(nvml: ModuleType, devices: list[_NvmlDevice]) -> tuple[tuple[int, int, str], ...]:
    words = ((a.reading.index, b.reading.index, _link(nvml, a, b)) for a, b in combinations(devices, 2))
    return tuple((a, b, word) for a, b, word in words if word is not None)


def _link(nvml: ModuleType, a: _NvmlDevice, b: _NvmlDevice) -> str | None:
    """Name the best way between two GPUs: NVLink from one to the other, NVLink through switches, or PCI."""
    num_links = a.far_ends[b.reading.pci] or min(a.far_ends[_SWITCH], b.far_ends[_SWITCH])
    if num_links:
        return f"NV{num_links}"
    with contextlib.suppress(nvml.NVMLError):
        return _ANCESTORS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(a.handle, b.handle))
    return None


# --- answers ---------------------------------------------------------------------------------------------------------


def _ask(nvml: ModuleType, question: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - pynvml is untyped
    """Return the answer, or None where this GPU or driver does not know; a lost GPU answers nothing and raises."""
    try:
        return question(*args)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None


def _mask(words: Iterable[int] | None) -> CpuSet | None:
    """Return the numbers of the set bits; an empty mask is None.

    No GPU is far from every CPU: NVML leaves the mask empty where it does not know, for one under a cpuset that
    excludes the GPU's own CPUs (seen in rapidsai/dask-cuda#1381).
    """
    return cpu_set.from_words(words or (), word_bits=_WORD_BITS) or None


def _text(value: str | bytes) -> str:
    """Return text; pynvml gives bytes up to 11.5 and in some structures."""
    return value.decode() if isinstance(value, bytes) else value


def _optional_text(value: str | bytes | None) -> str | None:
    return None if value is None else _text(value)
