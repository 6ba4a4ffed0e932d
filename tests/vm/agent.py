"""The first program inside a machine, which runs the jobs of /run/share/jobs.json one after another.

machine.py starts it and describes the jobs. It uses only the standard library. Importing torch takes half a minute in
emulation, so modules in `preload` are imported once, and a job `python -m MODULE` runs in a fork of this process. Its
ranks are still new processes.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

SHARE: Final = Path("/run/share")
CGROUPS: Final = Path("/sys/fs/cgroup")
DEVICES: Final = Path("/sys/bus/pci/devices")
TIMED_OUT: Final = 124


def main() -> None:
    """Prepare the machine, run every job, and write its status and time into its folder."""
    batch = json.loads((SHARE / "jobs.json").read_text())
    for address in batch["gpus"]:
        dress_up(address)
    (CGROUPS / "cgroup.subtree_control").write_text("+cpuset")
    for module in batch["preload"]:
        importlib.import_module(module)
    for job in batch["jobs"]:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            become(job)  # does not return
        status = wait(pid, job["timeout_s"])
        result = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        (SHARE / job["name"] / "result.json").write_text(json.dumps(result))


def become(job: dict[str, Any]) -> NoReturn:
    """Turn this fork into the job, inside its limits."""
    os.setsid()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(SHARE / job["name"] / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    if job["cpuset"] is not None:
        enter_cpuset(job["name"], *job["cpuset"])
    os.environ.update(job["env"])
    if job["refuse_policy"]:
        importlib.import_module("refuse_policy").refuse_policy_calls()
    python, *rest = job["argv"]
    if python == sys.executable and rest[0] == "-m":
        sys.path[0] = str(Path.cwd())  # as python -m does
        sys.argv = rest[1:]
        leave(run_as_main(rest[1]))
    else:
        os.execvp(python, job["argv"])  # noqa: S606 - the command is what the test asked for


def run_as_main(module: str) -> int:
    """Run a module as the main program; return its exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        if isinstance(left.code, str):
            sys.stderr.write(f"{left.code}\n")
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - printed as Python would
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> NoReturn:
    """End this fork as Python does, but without unloading torch's modules, which takes many seconds in emulation."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def enter_cpuset(name: str, cpus: str, nodes: str) -> None:
    """Move this process into a new cgroup v2 with these CPUs and nodes."""
    group = CGROUPS / name
    group.mkdir()
    for file, value in (("cpuset.cpus", cpus), ("cpuset.mems", nodes), ("cgroup.procs", "0")):
        try:
            (group / file).write_text(value)
        except OSError as error:
            sys.stderr.write(f"{file} does not take {value!r}: {error}\n")
            leave(1)


def wait(pid: int, timeout_s: float) -> int:
    """Return a child's exit status (negative: a signal), or TIMED_OUT after killing it and its session."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for end in (os.kill, os.killpg):  # it may not have its own session yet
        with suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return TIMED_OUT


def dress_up(address: str) -> None:
    """Make sysfs show NVIDIA's vendor number and a GPU's class for a device; all other files are unchanged."""
    for file, value in (("vendor", "0x10de\n"), ("class", "0x030200\n")):
        mask = Path(f"/run/{address}-{file}")
        mask.write_text(value)
        subprocess.run(["mount", "--bind", mask, (DEVICES / address / file).resolve()], check=True)


if __name__ == "__main__":
    main()
