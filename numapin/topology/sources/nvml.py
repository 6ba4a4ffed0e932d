"""Read the GPUs from NVML. The only importer of pynvml.

A query that fails leaves one value unknown; a GPU that does not answer is left out.

Source: the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base import cpu_set
from numapin.base.text import without_none
from numapin.system import calls
from numapin.topology.address import pci_address
from numapin.topology.model import Mig, Pcie
from numapin.topology.nics import LinkKind
from numapin.topology.readings import GpuHealth, GpuLoad, GpuProcess, NvmlReading, NvmlReadings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType
    from typing import Protocol, TypeVar

    from numapin.base.cpu_set import CpuSet

    _T = TypeVar("_T")

    class _NvmlError(Protocol):
        """pynvml's NVMLError; the library is untyped."""

        value: int  # an nvmlReturn_t


_LIBRARY: Final = "libnvidia-ml.so.1"  # pynvml tries no other name, and takes 17 ms to fail
_NEWEST: Final = "nvmlDeviceGetNumaNodeId"  # of the functions that are used here, the newest in nvidia-ml-py
_WORD_BITS: Final = 64
# Masks hold every id that Linux can be built for (8192 CPUs, 1024 nodes): ids may be sparse (up to node 255 on a
# POWER9), so the number of CPUs or nodes is not a bound. The longer mask costs no time (2 µs on an H200).
_CPU_WORDS: Final = 8192 // _WORD_BITS
_NODE_WORDS: Final = 1024 // _WORD_BITS

_SWITCH: Final = "NVSwitch"  # the far end of every NVLink to an NVSwitch; other far ends are PCI addresses

_ANCESTORS: Final = {  # nvmlGpuTopologyLevel_t -> link kind
    0: LinkKind.SAME_BOARD,
    10: LinkKind.ONE_SWITCH,
    20: LinkKind.SWITCHES,
    30: LinkKind.HOST_BRIDGE,
    40: LinkKind.SAME_NODE,
    50: LinkKind.SYSTEM,
}

_SLOWDOWNS: Final = {
    0x08: "hardware slowdown",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "power brake, by the power supply",
}
"""nvmlClocksEventReasons -> reason; the others are idle GPUs, clocks that somebody set, and the usual power cap."""

_REMEDIES: Final = {  # nvmlReturn_t -> remedy
    4: "let this user read and write /dev/nvidiactl and /dev/nvidia0, /dev/nvidia1, …",
    9: "load the driver: modprobe nvidia",
    12: "install the NVIDIA driver, or give the container its libnvidia-ml.so.1 (docker run --gpus all)",
    18: "the driver was updated under the running kernel module: reboot, or unload and load the nvidia modules",
}

_NO_DRIVER: Final = frozenset({9, 12})
"""nvmlReturn_t without a driver: "driver not loaded" and, from pynvml, "library not found"."""

_LOST: Final = frozenset({11, 15, 16, 999})
"""nvmlReturn_t of a GPU that has failed: an interrupt issue, it is lost, it must be reset, "unknown error"."""

_NO_PERMISSION: Final = 4

_SEE: Final = "check with: nvidia-smi"


class _NvmlDevice(NamedTuple):
    """One GPU that answered. `is_empty_mig`: in MIG mode without instances. `far_ends` counts its active NVLinks."""

    handle: object
    reading: NvmlReading
    is_empty_mig: bool
    far_ends: Counter[str | None]


def read_nvml(*, with_health: bool = False) -> NvmlReadings:
    """Read every GPU that the driver shows, and the links between them; with `with_health`, also its faults.

    Start NVML and shut it down again, without a CUDA context. Never raise: without NVML, `gpus` is None and a note
    has the error and its remedy; without GPUs it is empty.
    """
    with _started() as nvml:
        if isinstance(nvml, NvmlReadings):
            return nvml
        try:
            return _read(nvml, with_health=with_health)
        except nvml.NVMLError as error:
            return _failed("NVML cannot count the GPUs", error)


@contextlib.contextmanager
def open_loads(uuids: Iterable[str] | None) -> Iterator[Callable[[], dict[str, GpuLoad]]]:
    """Keep NVML started; yield a function that reads the load of these GPUs (None: of all): UUID -> load.

    GPUs that do not answer are left out, and all of them if NVML does not start. Each GPU takes 20 ms, the time over
    which NVML counts the bytes.
    """
    with _started() as nvml:
        if isinstance(nvml, NvmlReadings):
            yield dict
            return
        handles: dict[str, object] = {}
        if uuids is None:
            for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0):
                with contextlib.suppress(nvml.NVMLError):
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    handles[_text(nvml.nvmlDeviceGetUUID(handle))] = handle
        for uuid in uuids or ():
            with contextlib.suppress(nvml.NVMLError):
                handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        yield lambda: without_none({uuid: _load(nvml, handle) for uuid, handle in handles.items()})


def read_processes() -> dict[int, tuple[str, ...]]:
    """Return the UUIDs of the GPUs that each process computes on; empty if NVML does not start.

    In a container, the process ids may be those of the host.
    """
    found: dict[int, tuple[str, ...]] = {}
    with _started() as nvml:
        if isinstance(nvml, NvmlReadings):
            return {}
        for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0):
            with contextlib.suppress(nvml.NVMLError):  # a GPU that does not answer
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                for process in _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
                    found[process.pid] = (*found.get(process.pid, ()), uuid)
    return found


@contextlib.contextmanager
def _started() -> Iterator[ModuleType | NvmlReadings]:
    """Keep NVML started; yield its module, or readings that say why it could not be started."""
    if not calls.can_load(_LIBRARY):
        yield NvmlReadings(gpus=None, notes=(f"NVML could not be loaded: no {_LIBRARY}; {_REMEDIES[12]}",))
        return
    failed, problem = None, ""
    try:
        import pynvml
    except ImportError as error:
        problem = f"{error}; type: pip install nvidia-ml-py"
    else:
        if not hasattr(pynvml, _NEWEST):  # packages named pynvml before 12 hide the module of nvidia-ml-py
            problem = f"{pynvml.__file__} is too old; type: pip uninstall pynvml && pip install --upgrade nvidia-ml-py"
    if problem:
        failed = NvmlReadings(gpus=None, notes=(f"NVML cannot be used: {problem}",))
    else:
        try:
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)  # a driver without GPUs is not an error
        except pynvml.NVMLError as error:
            failed = _failed("NVML could not be loaded" if error.value == 12 else "NVML did not start", error)
    if failed is not None:
        yield failed
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # everything is read already
            pynvml.nvmlShutdown()


def _load(nvml: ModuleType, handle: object) -> GpuLoad | None:
    try:
        rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        # The GPU receives what the host sends; NVML's unit is 1000 bytes/s.
        received = _ask(nvml, nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    except nvml.NVMLError:
        return None
    return GpuLoad(
        busy_share=None if rates is None else rates.gpu / 100,
        h2d_gbps=None if received is None else received / 1e6,
        used_bytes=None if memory is None else memory.used,
        memory_bytes=None if memory is None else memory.total,
        power_w=None if milliwatts is None else milliwatts / 1e3,
    )


def _failed(what: str, error: _NvmlError) -> NvmlReadings:
    remedy = _REMEDIES.get(error.value, _SEE)
    return NvmlReadings(gpus=None, broken=error.value not in _NO_DRIVER, notes=(f"{what}: {_words(error)}; {remedy}",))


def _words(error: object) -> str:
    return str(error).rstrip(".")


def _read(nvml: ModuleType, *, with_health: bool) -> NvmlReadings:
    devices: list[_NvmlDevice] = []
    notes: list[str] = []
    lost: list[str] = []
    silent: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            devices.append(_device(nvml, index, with_health=with_health))
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} (in NVML's order) is left out: {_words(error)}; {_SEE}")
            if error.value in _LOST:
                lost.append(notes[-1])
            elif error.value != _NO_PERMISSION:  # which a container or a batch system may deny on purpose
                silent.append(notes[-1])
    for device in devices:
        if device.is_empty_mig:
            index = device.reading.index
            problem = f"GPU {index} is in MIG mode but has no instances, so CUDA cannot use it"
            notes.append(f"{problem}; leave MIG mode with: nvidia-smi -i {index} -mig 0")
    return NvmlReadings(
        gpus=tuple(device.reading for device in devices),
        driver=_optional_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion)),
        links=tuple(_links(nvml, devices)),
        notes=tuple(notes),
        lost=tuple(lost),
        silent=tuple(silent),
    )


def _device(nvml: ModuleType, index: int, *, with_health: bool) -> _NvmlDevice:
    """Read one GPU. Raises NVMLError if it is lost or does not report its identity."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    if pci is None:
        raise nvml.NVMLError(nvml.NVML_ERROR_INVALID_STATE)
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    is_mig = bool(mode and mode[0])
    persistence = _ask(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
    nodes = _ask(nvml, nvml.nvmlDeviceGetMemoryAffinity, handle, _NODE_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    own_node: int | None = _ask(nvml, nvml.nvmlDeviceGetNumaNodeId, handle)
    mig: list[Mig] = []
    num_mig = (_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0) if is_mig else 0
    for number in range(num_mig):  # the numbers of MIG instances may have holes
        instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        uuid = None if instance is None else _ask(nvml, nvml.nvmlDeviceGetUUID, instance)
        if uuid is not None:
            mig.append(Mig(uuid=_text(uuid), name=_optional_text(_ask(nvml, nvml.nvmlDeviceGetName, instance))))
    reading = NvmlReading(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        pci=pci,
        name=_optional_text(_ask(nvml, nvml.nvmlDeviceGetName, handle)),
        memory_nodes=_mask(nodes),
        cpus=_mask(_ask(nvml, nvml.nvmlDeviceGetCpuAffinity, handle, _CPU_WORDS)),
        own_node=None if own_node is None or own_node < 0 else own_node,
        pcie=Pcie(
            gen=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            width=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            max_gen=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            max_width=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        ),
        mig=tuple(mig),
        persistence=None if persistence is None else bool(persistence),
        health=_health(nvml, handle) if with_health else None,
    )
    far_ends = _far_ends(nvml, handle)
    return _NvmlDevice(handle=handle, reading=reading, is_empty_mig=is_mig and not reading.mig, far_ends=far_ends)


def _health(nvml: ModuleType, handle: object) -> GpuHealth:
    """Read a GPU's faults. Raises NVMLError if an answer shows that it has failed."""
    unread: dict[str, str] = {}

    def ask(name: str, query: Callable[..., _T], *args: object) -> _T | None:
        try:
            answer = query(handle, *args)
        except nvml.NVMLError as error:
            if error.value in _LOST:
                raise
            unread[name] = _words(error)
            return None
        unread.pop(name, None)
        return answer

    def uncorrected(name: str, counter: int) -> int | None:
        return ask(name, nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)

    rows = ask("rows", nvml.nvmlDeviceGetRemappedRows)
    retirement = ask("is_retirement_pending", nvml.nvmlDeviceGetRetiredPagesPendingStatus)
    reasons = ask("slowdowns", nvml.nvmlDeviceGetCurrentClocksEventReasons)
    if reasons is None:  # drivers before 535 have the function under its former name
        reasons = ask("slowdowns", nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    found = ask("processes", nvml.nvmlDeviceGetComputeRunningProcesses)
    slowdowns = None if reasons is None else tuple(word for bit, word in _SLOWDOWNS.items() if reasons & bit)
    processes = None if found is None else tuple(GpuProcess(each.pid, each.usedGpuMemory) for each in found)
    return GpuHealth(
        uncorrected=uncorrected("uncorrected", nvml.NVML_VOLATILE_ECC),
        uncorrected_ever=uncorrected("uncorrected_ever", nvml.NVML_AGGREGATE_ECC),
        is_remapping_pending=None if rows is None else bool(rows[2]),
        has_remapping_failed=None if rows is None else bool(rows[3]),
        is_retirement_pending=None if retirement is None else bool(retirement),
        slowdowns=slowdowns,
        processes=processes,
        unread=unread,
    )


# --- links -----------------------------------------------------------------------------------------------------------


def _far_ends(nvml: ModuleType, handle: object) -> Counter[str | None]:
    """Count the active NVLinks of a GPU by their far ends."""
    far_ends: Counter[str | None] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        active = _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if active is None:  # the GPU has no such link, nor any of a higher number
            break
        if not active:
            continue
        # Of an NVSwitch, the PCI address is the switch's own, and in a virtual machine it is often missing.
        kind = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            far_ends[_SWITCH] += 1
        else:
            pci = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            far_ends[None if pci is None else pci_address(_text(pci.busId))] += 1
    return far_ends


def _links(nvml: ModuleType, devices: list[_NvmlDevice]) -> Iterator[tuple[int, int, str]]:
    """Yield the word for the best path between two GPUs: direct NVLink, NVLink through switches, or PCI."""
    for a, b in combinations(devices, 2):
        num_links = a.far_ends[b.reading.pci] or min(a.far_ends[_SWITCH], b.far_ends[_SWITCH])
        word: str | None = f"NV{num_links}" if num_links else None
        if word is None:
            with contextlib.suppress(nvml.NVMLError):
                word = _ANCESTORS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(a.handle, b.handle))
        if word is not None:
            yield a.reading.index, b.reading.index, word


# --- answers ---------------------------------------------------------------------------------------------------------


def _ask(nvml: ModuleType, query: Callable[..., _T], *args: object) -> _T | None:
    """Return the answer, or None if this GPU or driver does not support the query. Raises NVMLError if it is lost."""
    try:
        return query(*args)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None


def _mask(words: Iterable[int] | None) -> CpuSet | None:
    """Return the numbers of the set bits, or None if there are none.

    Every GPU has near CPUs: NVML leaves the mask empty if it does not know them, e.g. under a cpuset that excludes the
    GPU's own CPUs (seen in rapidsai/dask-cuda#1381).
    """
    return cpu_set.from_words(words or (), word_bits=_WORD_BITS) or None


def _text(value: str | bytes) -> str:
    """Return text; pynvml returns bytes up to version 11.5 and in some structures."""
    return value.decode() if isinstance(value, bytes) else value


def _optional_text(value: str | bytes | None) -> str | None:
    return None if value is None else _text(value)
