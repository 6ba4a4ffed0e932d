"""`numapin doctor` as a user runs it: on this machine, under seccomp, with a fake driver, and on captured machines."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.doctor.given import machine
from tests.integration.launching import NUMAPIN, REFUSE_POLICY, call, forked
from tests.nvml import fake
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.launching import Done

GPUS = [
    fake.FakeGpu(uuid="GPU-a", pci="00000000:10:00.0", name="NVIDIA A100", persistence=False, pcie=(1, 16, 4, 16)),
    fake.FakeGpu(uuid="GPU-b", pci="00000000:20:00.0", name="NVIDIA T400", persistence=True, pcie=(4, 16, 4, 16)),
]


def _report(*arguments: str, **changes: str) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    return _read(forked("doctor", "--json", *arguments, cwd=None, **changes))


def _read(done: Done) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    assert done.err == ""
    report = json.loads(done.out)
    return done.status, report, {finding["check"]: finding for finding in report["findings"]}


def test_json_is_the_contract() -> None:
    """Every finding has the same fields, severities are fixed words or null, and the status follows from them."""
    status, report, found = _report()
    assert set(report) == {"schema", "host", "source", "findings", "advice"}
    assert (report["schema"], report["source"], report["host"]) == ("numapin.doctor/1", "live", os.uname().nodename)
    for finding in report["findings"]:
        assert set(finding) == {"check", "severity", "what", "where", "why", "remedy"}
        assert finding["severity"] in ("error", "warning", "note", "ok", None)
        assert finding["why"].endswith(".")
    assert status == any(finding["severity"] == "error" for finding in report["findings"])
    assert found["kernel"]["what"].startswith(f"Linux {os.uname().release}")
    assert set(report["advice"]) == {"verdict", "footprint_bytes", "room_bytes", "reason", "remedy"}
    assert " per rank can be pinned (" in report["advice"]["reason"]


def test_seccomp() -> None:
    """Under Docker's default seccomp profile, all four calls are reported as refused, with their names."""
    _, _, found = _read(call(*REFUSE_POLICY, *NUMAPIN, "doctor", "--json"))
    finding = found["memory-policy"]
    assert finding["severity"] == "warning"
    for name in ("get_mempolicy", "set_mempolicy", "mbind", "move_pages"):
        assert f"{name} (EPERM)" in finding["what"]
    assert "seccomp mode 2" in finding["what"]
    assert finding["remedy"].startswith("docker run ")


class TestDriver:
    """A fake NVML that the real pynvml loads."""

    def test_gpus(self, fake_nvml: fake.FakeNvml, tmp_path: Path) -> None:
        """Persistence, links, models and their order come from NVML."""
        environ = fake_nvml.environment(tmp_path, fake.render(GPUS))
        _, report, found = _report(**environ)
        assert found["persistence"]["what"] == "off for gpu0"
        assert found["pcie-link"]["what"].startswith("gpu0 runs at PCIe 1 x16 instead of PCIe 4 x16; idle")
        assert any("CUDA_DEVICE_ORDER=PCI_BUS_ID" in finding["what"] for finding in report["findings"])
        assert found["driver"]["what"].startswith("580.159.04, kernel module ")
        for severity, status in (("error", 0), ("warning", 0), ("note", 1)):
            only = _report("--only", "persistence,python", "--skip", "python", "--fail-on", severity, **environ)
            assert (only[0], [*only[2]]) == (status, ["persistence"])

    def test_a_prolog(self, fake_nvml: fake.FakeNvml, tmp_path: Path) -> None:
        """A machine file, counts and idle GPUs are expected together; the check of processes is made in any case."""
        gpus = [replace(GPUS[0], processes=((os.getpid(), 512),), ecc=(0, 0)), replace(GPUS[1], ecc=(0, 0))]
        environ = fake_nvml.environment(tmp_path, fake.render(gpus))
        saved = tmp_path / "host.json"
        assert call(*NUMAPIN, "topo", "--save", str(saved), cwd=None, **environ).status == 0
        expected = ("--only", "ecc", "--expect", str(saved), "--expect", "driver=580,idle")
        status, _, found = _report(*expected, **environ)
        assert status == 1
        assert found["expect"]["what"].endswith("driver")
        assert [found[name]["severity"] for name in ("expect", "gpu-processes")] == ["ok", "error"]
        assert found["gpu-processes"]["what"].startswith(f"gpu0: pid {os.getpid()} (")
        busy = _report("--only", "gpu-processes", **environ)
        assert (busy[0], busy[2]["gpu-processes"]["severity"]) == (0, "ok")

        idle = fake_nvml.environment(tmp_path, fake.render([replace(GPUS[0], ecc=(0, 0))]))
        status, report, found = _report(*expected, **idle)
        assert (status, found["gpu-processes"]["severity"]) == (1, "ok")
        assert [finding["what"] for finding in report["findings"] if finding["check"] == "expect"] == [
            "gpus: 1 instead of 2 (missing: 0000:20:00.0)",
        ]

    def test_a_process_that_is_ending(self, fake_nvml: fake.FakeNvml, tmp_path: Path) -> None:
        """A GPU that becomes idle within some seconds is idle: the processes of the job before take time to end."""
        environ = fake_nvml.environment(tmp_path, fake.render([replace(GPUS[0], processes=(os.getpid(),))]))
        idle = tmp_path / "idle"
        idle.write_text(fake.render(GPUS[:1]))
        line = (*NUMAPIN, "doctor", "--only", "gpu-processes", "--expect", "idle")
        with subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, text=True) as doctor:
            calls = tmp_path / "calls"
            asked = "nvmlDeviceGetComputeRunningProcesses"
            assert wait_until(lambda: calls.exists() and asked in calls.read_text(), limit_s=60)
            idle.rename(environ["FAKE_NVML_DATA"])
            out, _ = doctor.communicate(timeout=60)
        assert (doctor.returncode, "no process computes on a GPU" in out) == (0, True), out

    def test_a_driver_that_does_not_match(self, fake_nvml: fake.FakeNvml, tmp_path: Path) -> None:
        """It is an error with status 1, reported once."""
        environ = fake_nvml.environment(tmp_path, fake.render(GPUS, fails={"init": 18}))
        status, report, found = _report(**environ)
        assert (status, found["driver"]["severity"]) == (1, "error")
        assert "reboot" in found["driver"]["remedy"]
        assert sum("NVML did not start" in finding["what"] for finding in report["findings"]) == 1


def test_without_libnuma(tmp_path: Path) -> None:
    """A libnuma that cannot be used is an error; the other checks are still made."""
    compiler = fake.compiler()
    if compiler is None:
        pytest.skip("no C compiler on PATH to build an empty libnuma with; type: apt-get install gcc libc6-dev")
    library = str(tmp_path / "libnuma.so.1")
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", library], check=True)
    status, _, found = _report(LD_LIBRARY_PATH=str(tmp_path))
    assert (status, found["libnuma"]["severity"]) == (1, "error")
    assert found["libnuma"]["what"].startswith("libnuma could not be loaded: ")
    assert "libnuma1" in found["libnuma"]["remedy"]
    assert found["memory-policy"]["severity"] is None
    assert found["nodes"]["severity"] is not None


def test_the_remedy_gpu_nodes_works(tmp_path: Path) -> None:
    """With --gpu-nodes, the nodes of all GPUs are known; a GPU that is not here is an error that names it."""
    root = str(machine(tmp_path, "2node-48cpu-8gpu-nosysfs"))
    pairs = ",".join(f"{index}={index // 4}" for index in range(8))
    assert _report("--root", root)[2]["gpu-nodes"]["severity"] == "warning"
    assert _report("--root", root, "--gpu-nodes", pairs)[2]["gpu-nodes"]["severity"] == "ok"
    done = forked("doctor", "--gpu-nodes", "99=0")
    assert (done.status, "no GPU matches '99'" in done.err, "Traceback" in done.err) == (2, True, False), done.err


@pytest.mark.parametrize(("command", "status"), [("doctor", 3), ("topo", 1)])
def test_an_unexpected_exception_is_no_finding(command: str, status: int, tmp_path: Path) -> None:
    """It is shown with its traceback; doctor does not end with 1, which means findings."""
    (tmp_path / "numa.py").write_text("raise ZeroDivisionError('here')")  # py-libnuma's package
    done = call(*NUMAPIN, command, cwd=None, PYTHONPATH=str(tmp_path))
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert done.err.endswith("ZeroDivisionError: here\n")
