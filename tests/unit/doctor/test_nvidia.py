"""The readings behind the checks of GPUs: NVML's, with the stand-in library, and the kernel log's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.nvml.fake import FakeGpu, FakeNvml, render
from tests.unit.doctor.seam import (
    GpuHealth,
    GpuProcess,
    GpuUser,
    KernelLog,
    NvmlReading,
    NvmlReadings,
    live,
    proc,
    read_kernel_log,
)

_GPU = FakeGpu(
    uuid="GPU-a",
    pci="00000000:1B:00.0",
    ecc=(2, 7),
    rows=(1, 0),
    retirement=0,
    reasons=0x48,
    processes=(4711, (1, 512)),
)
_BARE = FakeGpu(uuid="GPU-b", pci="00000000:1C:00.0")
_READ = """if True:
    import json
    from dataclasses import asdict
    from numapin.doctor.live import gpu_users
    from numapin.topology.sources.nvml import read_nvml
    nvml = read_nvml(with_health=True)
    healths = [asdict(gpu.health) for gpu in nvml.gpus]
    print(json.dumps({"healths": healths, "users": gpu_users(nvml), "notes": nvml.notes, "lost": nvml.lost,
                      "silent": nvml.silent}))
"""
_LOG = (
    "6,0,0,-;Linux version 6.8.0\n"
    "4,1,5000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    " SUBSYSTEM=pci\n"
    "4,2,6000000,c;NVRM: Xid (PCI:0008:01:00 GPU-I:05): 31, pid=4711, name=python, MMU Fault\n"
    "12,3,7000000,-;NVRM: Xid (PCI:0000:1b:00): 79, written by a program\n"
    "4,4,8000000,-;NVRM: Xid (0000:03:00): 14, Channel 00000001\n"
    "4,5,9000000,-;NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.\n"
)


def _read(fake_nvml: FakeNvml, folder: Path, *gpus: FakeGpu, old: bool = False) -> dict[str, Any]:
    environ = fake_nvml.environment(folder, render(gpus), old=old)
    done = subprocess.run([sys.executable, "-c", _READ], env=environ, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


QUESTIONS = {
    "ecc": {"uncorrected", "uncorrected_ever"},
    "rows": {"rows"},
    "retirement": {"is_retirement_pending"},
    "reasons": {"slowdowns"},
    "processes": {"processes"},
}
"""What is unknown if a question is refused."""


def test_health_as_nvml_reports_it(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """Each value has its own field; of processes, name and user are those of the process that is there.

    Of questions that are refused, only the own answer of each is unknown.
    """
    pid = os.getpid()
    refused = [replace(_GPU, fails={question: 4}) for question in QUESTIONS]
    found = _read(fake_nvml, tmp_path, replace(_GPU, processes=((pid, 512), 4194304)), _BARE, *refused)
    health, bare, *others = found["healths"]
    assert (health["uncorrected"], health["uncorrected_ever"]) == (2, 7)
    assert (health["is_remapping_pending"], health["has_remapping_failed"]) == (True, False)
    assert health["is_retirement_pending"] is False
    assert health["slowdowns"] == ["hardware slowdown", "heat, by the hardware"]
    assert health["unread"] == {}
    (gpu, own, used_bytes, name, user), gone = (found["users"])[:2]
    assert (gpu, own, used_bytes) == (0, pid, 512 << 20)
    assert name == Path(f"/proc/{pid}/comm").read_text().strip()
    assert user
    assert gone == [*GpuUser(0, 4194304, 1 << 30, None, None)]  # no process has so high an id
    assert {value for field, value in bare.items() if field not in ("unread", "processes")} == {None}
    assert bare["processes"] == []
    assert {*bare["unread"]} == {"uncorrected", "uncorrected_ever", "rows", "is_retirement_pending", "slowdowns"}
    assert [{*one["unread"]} for one in others] == [*QUESTIONS.values()]


def test_a_process_of_the_host_seen_from_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """There its id is another process's, so no name and no user is given of a process that has no GPU open."""
    health = GpuHealth(processes=(GpuProcess(os.getpid(), 1 << 20),))
    nvml = NvmlReadings(gpus=(NvmlReading(index=0, uuid=None, pci="", health=health),))
    ((*_, name, user),) = live.gpu_users(nvml)
    assert (name is None, user is None) == (False, False)
    monkeypatch.setattr(proc, "pid_namespace", lambda: 4026532000)
    assert live.gpu_users(nvml) == (GpuUser(0, os.getpid(), 1 << 20, None, None),)


def test_an_old_driver(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """What it lacks is unknown with NVML's own words; clocks are read by their former name."""
    (health,) = _read(fake_nvml, tmp_path, _GPU, old=True)["healths"]
    assert (health["is_remapping_pending"], health["has_remapping_failed"]) == (None, None)
    assert {*health["unread"]} == {"rows"}
    assert "Not Found" in health["unread"]["rows"]
    assert (health["slowdowns"], health["uncorrected"]) == (["hardware slowdown", "heat, by the hardware"], 2)


def test_gpus_that_are_left_out(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """One that must be reset or is lost has failed, whichever question shows it.

    For want of power, or with a damaged InfoROM, it is one that should be there; without permission it is not.
    """
    failed = [
        replace(_GPU, fails={question: code}) for question in ("handle", *QUESTIONS) for code in (11, 15, 16, 999)
    ]
    silent = [replace(_GPU, fails={"handle": code}) for code in (4, 8, 10, 14, 17)]
    found = _read(fake_nvml, tmp_path, _GPU, *failed, *silent)
    notes, num_failed = found["notes"], len(failed)
    assert len(found["healths"]) == 1
    assert (found["lost"], found["silent"]) == (notes[:num_failed], notes[num_failed + 1 :])
    assert len(notes) == num_failed + 5
    assert all(f"GPU {number} (in NVML's order) is left out" in note for number, note in enumerate(notes[:-5], 1))
    assert f"GPU {num_failed + 1} " in notes[num_failed]


# --- errors of the driver in the kernel's buffer ---------------------------------------------------------------------


def _read_log(folder: Path, text: str) -> KernelLog:
    log = folder / "kmsg"
    log.write_text(text)
    return read_kernel_log(str(log))


def test_the_kernels_buffer(tmp_path: Path) -> None:
    """Both ways in which drivers write the address are read, and the kernel's own records only.

    If the buffer has lost its beginning, the time of its first message is known.
    """
    found, later = _read_log(tmp_path, _LOG), _read_log(tmp_path, _LOG.partition("\n")[2])
    assert [(xid.code, xid.pci) for xid in found.xids or ()] == [
        (79, "0000:1b:00.0"),
        (31, "0008:01:00.0"),
        (14, "0000:03:00.0"),
    ]
    first, booted_s = (found.xids or ())[0], time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert first.message.endswith("GPU has fallen off the bus.")
    assert first.at_s == pytest.approx(booted_s + 5, abs=1)
    assert found.begins_s is None
    assert later.begins_s == pytest.approx(booted_s + 5, abs=1)


def test_a_crash_is_no_error_of_the_driver(tmp_path: Path) -> None:
    """The kernel's line begins with the name of the program and ends with that of its file: users choose both."""
    crashes = (
        "NVRM: Xid (0[4711]: segfault at 0 ip 0000555555555131 error 6 in a): 79, x[1131,555555555000+1000]",
        "NVRM: Xid (PCI:[4711]: segfault at 0 ip 0000555555555131 error 6 in 0000:1b:00): 79, x[1131,5+1000]",
    )
    lines = (f"6,{number},9000000,-;{line}\n" for number, line in enumerate(crashes))
    assert _read_log(tmp_path, "".join(lines)).xids == ()


def test_without_a_message_of_the_kernel(tmp_path: Path) -> None:
    """The answer is unknown, with the reason."""
    log = tmp_path / "kmsg"
    assert read_kernel_log(str(log)) == (None, None, f"{log} cannot be read: No such file or directory")
    for content in ("", "12,3,7000000,-;written by a program\n"):
        assert _read_log(tmp_path, content) == (None, None, f"{log} shows no message of the kernel")
