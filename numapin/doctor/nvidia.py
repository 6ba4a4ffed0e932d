"""Checks of NVIDIA GPUs' memory and clocks, of what computes on them, and of the driver's errors in the kernel log.

Sources: the NVML API reference; https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, whose column
"immediate action" decides on the severity of an Xid; https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from numapin.base.formats import render_size
from numapin.base.text import counted, printable
from numapin.doctor.check import Host, Live, Result, Xid, error, joined, live_check, note, ok, unknown, warning

if TYPE_CHECKING:
    from numapin.topology.readings import GpuHealth

_RESET_XIDS: Final = frozenset({46, 48, 54, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
"""Xids after which the GPU must be reset, the host restarted or the hardware looked at: no job can use the GPU."""
_NVLINK_XIDS: Final = frozenset({74, *range(144, 151)})
_RECOVERY_XID: Final = 154
"""The Xid with the repair that a GPU needs: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset …)"."""
_RECOVERED: Final = "to 0x0 (None)"
_MPS: Final = "nvidia-cuda-mps"  # its server's name, which the kernel cuts; it stays while no program runs
_MOST_SHOWN: Final = 8  # errors or processes in a message
_MOST_CHARS: Final = 80  # of an error's text


def _healths(live: Live, host: Host) -> dict[str, GpuHealth] | Result:
    """Return the health of each GPU, by its name; or the result of a check that needs it."""
    if live.nvml.gpus is None:
        is_nvidia_host = live.nvml.broken or any(gpu.is_nvidia for gpu in host.topology.gpus)
        return unknown("NVML does not answer; see the check: driver") if is_nvidia_host else ok("no NVIDIA GPU")
    if not live.nvml.gpus:
        return ok("NVML shows no GPU")
    healths = {f"gpu{gpu.index}": gpu.health for gpu in live.nvml.gpus}
    return {name: health for name, health in healths.items() if health is not None}


def _unread(healths: dict[str, GpuHealth], field: str) -> str:
    """Return on which GPUs a field is unknown, and why; "" if it is known on all."""
    by_error: dict[str, list[str]] = {}
    for name, health in healths.items():
        if field in health.unread:
            by_error.setdefault(health.unread[field], []).append(name)
    return "; ".join(f"NVML does not report it of {', '.join(names)}: {why}" for why, names in by_error.items())


@live_check(
    "ecc",
    where="nvmlDeviceGetTotalEccErrors, nvmlDeviceGetRemappedRows, nvmlDeviceGetRetiredPagesPendingStatus",
    why="An error that ECC cannot correct ends the job that meets it. The next job may meet it again until the row or "
    "page is replaced, which takes a reset of the GPU.",
)
def ecc(live: Live, host: Host) -> Result:
    """Find GPU memory with errors that ECC could not correct, or that is waiting for repair."""
    healths = _healths(live, host)
    if isinstance(healths, Result):
        return healths
    failed = [name for name, health in healths.items() if health.has_remapping_failed]
    if failed:
        remedy = "drain the host and have the GPU replaced; see: nvidia-smi -q -d ROW_REMAPPER"
        return error(f"a row of the memory cannot be replaced any more: {', '.join(failed)}", remedy=remedy)
    faults = []
    for name, health in healths.items():
        if health.uncorrected:
            faults.append(f"{name}: {counted(health.uncorrected, 'uncorrected error')} since the driver was loaded")
        if health.is_remapping_pending:
            faults.append(f"{name}: a row is replaced at the next reset")
        if health.is_retirement_pending:
            faults.append(f"{name}: a page is retired at the next reset")
    if faults:
        return warning("; ".join(faults), remedy="end the jobs on the GPU, then: sudo nvidia-smi --gpu-reset -i INDEX")
    # GPUs before Ampere retire pages, later ones replace rows: either answer will do.
    silent = {name: each for name, each in healths.items() if {"rows", "is_retirement_pending"} <= each.unread.keys()}
    unread = _unread(healths, "uncorrected") or _unread(silent, "rows")
    if unread:
        return unknown(unread)
    counts = [f"{name}: {health.uncorrected_ever}" for name, health in healths.items() if health.uncorrected_ever]
    ever = f"; over the life of the GPU: {', '.join(counts)}" if counts else ""
    return ok(f"no uncorrected error since the driver was loaded{ever}")


@live_check(
    "slowdown",
    where="nvmlDeviceGetCurrentClocksEventReasons",
    why="A GPU that is too hot, or whose power supply is too weak, lowers its clocks, often to a half or less. All "
    "other ranks of the job wait for it.",
)
def slowdown(live: Live, host: Host) -> Result:
    """Find GPUs whose hardware lowers their clocks at the moment."""
    healths = _healths(live, host)
    if isinstance(healths, Result):
        return healths
    slow = [f"{name}: {', '.join(health.slowdowns)}" for name, health in healths.items() if health.slowdowns]
    if slow:
        remedy = "nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE; then look at fans, air flow and power supplies"
        return warning("; ".join(slow), remedy=remedy)
    unread = _unread(healths, "slowdowns")
    return unknown(unread) if unread else ok("no clocks are lowered because of heat or lack of power")


@live_check(
    "gpu-processes",
    where="nvmlDeviceGetComputeRunningProcesses, /proc/PID/comm and its owner",
    why="Processes that an earlier job left behind hold memory and slow down the next job on the same GPU. They are "
    "an error with --expect idle only, if they are still there after 5 seconds.",
)
def gpu_processes(live: Live, host: Host) -> Result:
    """Find processes that compute on GPUs before a job has started."""
    healths = _healths(live, host)
    remedy = "run it as root, or without --expect idle"
    if isinstance(healths, Result):
        is_unknown = healths.severity is None or host.topology.gpus  # of other vendors
        if host.must_be_idle and is_unknown:
            return error(f"which processes use the GPUs is unknown: {healths.what}", remedy=remedy)
        return healths
    shown = []
    for each in live.gpu_users:
        who = f" ({each.name}, {each.user})" if each.name is not None else " (not visible from here)"
        memory = "memory unknown" if each.used_bytes is None else render_size(each.used_bytes)
        shown.append(f"gpu{each.gpu}: pid {each.pid}{who}, {memory}")
    what = joined(shown, most=_MOST_SHOWN)
    unread = _unread(healths, "processes")
    if host.must_be_idle and shown:
        pids = " ".join(str(each.pid) for each in live.gpu_users[:_MOST_SHOWN] if each.name is not None)
        remedy = "find out whose they are, as root and outside of containers: nvidia-smi"
        if pids:
            remedy = f"find out whose they are: ps -o pid,user,lstart,cmd {pids}"
        if any(each.name == _MPS for each in live.gpu_users):
            remedy = f"end MPS: echo quit | nvidia-cuda-mps-control (as the user who started it); {remedy}"
        return error(what, remedy=remedy)
    if unread:
        return error(unread, remedy=remedy) if host.must_be_idle else unknown(unread)
    return ok(what or "no process computes on a GPU")


@live_check(
    "xid",
    where="/dev/kmsg",
    why="After some Xid errors a GPU cannot be used until it is reset or the host restarted; others end the job that "
    "caused them.",
)
def xid(live: Live, host: Host) -> Result:
    """Find errors (Xid) of NVIDIA's driver in the kernel log since the host was started."""
    log = live.kernel_log
    if log.xids is None:
        return unknown(log.problem)
    labels = {gpu.pci: gpu.label for gpu in host.topology.gpus}
    begins = "the host was started" if log.begins_s is None else _time(log.begins_s)
    latest: dict[tuple[str, int], tuple[int, Xid]] = {}  # by GPU and code, with their number
    for each in log.xids:
        if each.code == _RECOVERY_XID and _RECOVERED in each.message:  # earlier errors no longer count
            latest = {key: found for key, found in latest.items() if key[0] != each.pci}
            begins = f"{labels.get(each.pci, each.pci)} recovered at {_time(each.at_s)}"
        else:
            number, _ = latest.pop((each.pci, each.code), (0, None))
            latest[each.pci, each.code] = number + 1, each
    if not latest:
        return ok(f"no error since {begins}")
    in_order = sorted(latest.values(), key=lambda found: (_order(found[1].code), -found[1].at_s))
    shown = []
    for number, each in in_order:
        times = f"{number} times, last at" if number > 1 else "at"
        text = printable(each.message)[:_MOST_CHARS]
        shown.append(f"{labels.get(each.pci, each.pci)}: Xid {each.code} {times} {_time(each.at_s)}: {text}")
    what, worst = joined(shown, most=_MOST_SHOWN), _order(in_order[0][1].code)
    if worst == 0:
        return error(what, remedy="drain the host; reset the GPU (sudo nvidia-smi --gpu-reset -i INDEX) or reboot")
    if worst == 1:
        return warning(what, remedy="nvidia-smi nvlink --status; if the errors return, have the link examined")
    return note(what, remedy="programs cause these, too; look them up in NVIDIA's Xid catalog")


def _order(code: int) -> int:
    if code in _RESET_XIDS or code == _RECOVERY_XID:
        return 0
    return 1 if code in _NVLINK_XIDS else 2


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
