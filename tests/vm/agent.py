"""The first program inside a machine, which runs the jobs of /run/share/jobs.json one after another.

machine.py starts it and describes the jobs. It uses only the standard library. In emulation, importing torch takes more
than a minute, and importing numapin seconds, so modules in `preload` are imported once, and a job `python -m MODULE`
runs in a fork of this process. Its ranks are still new processes. A probe that runs numapin asks this process for
another fork (`numapin`).
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

SHARE: Final = Path("/run/share")
CGROUPS: Final = Path("/sys/fs/cgroup")
DEVICES: Final = Path("/sys/bus/pci/devices")
REQUESTS: Final = Path("/run/agent")
TIMED_OUT: Final = 124


def main() -> None:
    """Prepare the machine, run every job, and write its status and time into its folder."""
    batch = json.loads((SHARE / "jobs.json").read_text())
    for address in batch["gpus"]:
        dress_up(address)
    (CGROUPS / "cgroup.subtree_control").write_text("+cpuset")
    for module in batch["preload"]:
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX) as requests:
        requests.bind(str(REQUESTS))
        requests.listen()
        for job in batch["jobs"]:
            began = time.monotonic()
            pid = os.fork()
            if pid == 0:
                requests.close()
                become(job, SHARE / job["name"])  # does not return
            status = wait(pid, job["timeout_s"], requests)
            result = {"status": status, "seconds": round(time.monotonic() - began, 1)}
            (SHARE / job["name"] / "result.json").write_text(json.dumps(result))


def numapin(*arguments: str, refuse_policy: bool = False) -> dict[str, Any]:
    """Run numapin in a fork of the agent, with this process's environment; return its status, stdout and stderr.

    It is no child of the process that asks, and runs on all CPUs.
    """
    job = {
        "argv": [sys.executable, "-m", "numapin", *arguments],
        "env": dict(os.environ),
        "cpuset": None,
        "refuse_policy": refuse_policy,
    }
    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(str(REQUESTS))
        agent.sendall(json.dumps(job).encode())
        agent.shutdown(socket.SHUT_WR)
        result: dict[str, Any] = json.loads(read_all(agent))
    return result


def verify(path: Path, *options: str) -> None:
    """Write the result of `numapin verify --json`, with its report decoded."""
    done = numapin("verify", "--json", *options)
    path.write_text(json.dumps({**done, "report": json.loads(done["stdout"]) if done["stdout"] else None}))


def answer(connection: socket.socket) -> NoReturn:
    job = json.loads(read_all(connection))
    folder = Path(tempfile.mkdtemp())
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(job, folder)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = {name: (folder / name).read_text(errors="replace") for name in ("stdout", "stderr")}
    connection.sendall(json.dumps({"status": status, **output}).encode())
    os._exit(0)


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def become(job: dict[str, Any], folder: Path) -> NoReturn:
    """Turn this fork into the job, inside its limits, with stdout and stderr in a folder."""
    os.setsid()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
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


def wait(pid: int, timeout_s: float, requests: socket.socket) -> int:
    """Return a child's exit status (negative: a signal), or TIMED_OUT after killing it and its session.

    Requests of its processes are answered meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if select.select([requests], [], [], 0.05)[0]:
            connection, _ = requests.accept()
            if os.fork() == 0:
                answer(connection)
            connection.close()
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
