"""The process of `bench train`: it starts the ranks once, under one launcher, and asks them for one loader at a time.

Edge. Comes in: specs (see `train.train_benchmark`) from the harness. Goes out: the figures of rank 0, which count all
ranks, as soon as all ranks have answered. Ranks of the same launcher train with every loader, so that only the loader
differs. Images are made here, before a rank needs them.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numapin.base import sizes
from numapin.bench.cases.launch import PEERS as LAUNCHERS
from numapin.bench.cases.train import (
    BASELINE,
    NUM_IMAGES,
    PEER_MODULES,
    Material,
    TrainBenchOptions,
    case_of,
    needed_shm_bytes,
)
from numapin.bench.child import serve
from numapin.bench.measure.train_wire import SOCKET, Line
from numapin.bench.python import running_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.bench.cases.train import TrainCase
    from numapin.bench.child import Harness

_POLL_S: Final = 0.2
_GRACE_S: Final = 8.0  # less than the harness's, for ranks that leave their process group
_LOG: Final = "launcher.log"
_SHM: Final = Path("/dev/shm")  # noqa: S108 - where torch's loader puts batches


class RankFailedError(Exception):
    """A rank failed or ended; the text is its own error, if it had one."""


class TrainJob:
    """The ranks under their launcher, and a connection to each."""

    def __init__(self, options: TrainBenchOptions) -> None:
        self._log = Path(options.folder, _LOG)
        self._lines: list[Line] = []
        os.chdir(options.folder)
        Path(SOCKET).unlink(missing_ok=True)
        launcher = (*LAUNCHERS[options.launcher], "--nproc-per-node", str(options.num_ranks), "--no-python")
        with socket.socket(socket.AF_UNIX) as listening, self._log.open("wb") as log:
            listening.bind(SOCKET)
            listening.listen(options.num_ranks)
            listening.settimeout(_POLL_S)
            self._launcher = subprocess.Popen(
                (*launcher, *running_module("numapin.bench.measure.train_rank")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            while len(self._lines) < options.num_ranks:
                with suppress(TimeoutError):
                    self._lines.append(Line(listening.accept()[0]))
                self._require_alive()
        numbers = [_required(line.receive())["rank"] for line in self._lines]
        self._lines = [line for _, line in sorted(zip(numbers, self._lines, strict=True))]

    def ask(self, spec: Mapping[str, object]) -> dict[str, Any]:
        """Let all ranks measure, and return rank 0's answer. Raises RankFailedError if one fails or ends."""
        for line in self._lines:
            line.send(spec)
        answers: dict[Line, dict[str, Any]] = {}
        while len(answers) < len(self._lines):
            waiting = [line for line in self._lines if line not in answers]
            for line in select.select(waiting, [], [], _POLL_S)[0]:
                answers[line] = self._answer(line)
        return answers[self._lines[0]]

    def _answer(self, line: Line) -> dict[str, Any]:
        content = line.receive()
        if content is None:
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(_GRACE_S)
            self._require_alive()
            raise RankFailedError("it ended without a word")
        if "failed" in content:
            raise RankFailedError(content["failed"])
        return content

    def _require_alive(self) -> None:
        status = self._launcher.poll()
        if status is not None:
            lines = self._log.read_text(errors="replace").splitlines()
            raise RankFailedError(f"the launcher ended with status {status}: {_cause(lines)}")

    def close(self) -> None:
        """End the connections, upon which the ranks end, and wait for the launcher."""
        for line in self._lines:
            line.close()
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_GRACE_S)  # the harness ends what is left


def _required(content: dict[str, Any] | None) -> dict[str, Any]:
    if content is None:
        raise RankFailedError("it ended as it started")
    return content


def _cause(lines: Iterable[str]) -> str:
    """Return the first line that looks like an exception's last one, else the last line."""
    shown = [line.strip() for line in lines if line.strip()]
    errors = [line for line in shown if line.partition(":")[0].endswith(("Error", "Exception"))]
    return next(iter([*errors, *shown[-1:]]), "it wrote nothing")


class Coordinator:
    """What measures specs: the ranks are started with the first one."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._job: TrainJob | None = None

    def measure(self, spec: dict[str, Any], harness: Harness) -> None:
        """Measure one loader on one model."""
        case, options = case_of(spec["case"]), TrainBenchOptions(**spec["options"])
        why_not = _why_not(spec["peer"], case, options)
        if why_not is not None:
            harness.skip(why_not)
            return
        if case.material is Material.JPEG and not Path(options.folder, f"{NUM_IMAGES - 1}.jpg").exists():
            from numapin.bench.measure.train_data import make_images

            make_images(Path(options.folder))
        if self._job is None:
            self._job = TrainJob(options)
            self._stack.callback(self._job.close)
        harness.wait_for_start(_pause)
        num_steps = Path(options.folder, f"{case.name}.steps")  # another process may have measured before a failure
        answer = self._job.ask(_with_steps(spec, num_steps))
        num_steps.write_text(str(answer["details"]["num_steps"]))
        harness.report(answer["figures"], details=answer["details"], idle=_pause)


def _with_steps(spec: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the spec with the number of steps that earlier windows of its model had, if there were any."""
    if not path.exists():
        return dict(spec)
    return {**spec, "options": {**spec["options"], "num_steps": int(path.read_text())}}


def _why_not(peer: str, case: TrainCase, options: TrainBenchOptions) -> str | None:
    """Return why a loader cannot run here: its library is missing, or its batches do not fit into /dev/shm."""
    module = PEER_MODULES.get(peer, "numapin")
    if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
        return f"{module} is not installed"
    needed, free = needed_shm_bytes(case, options), shutil.disk_usage(_SHM).free
    if peer != BASELINE or needed <= free:
        return None
    room = f"its batches need {sizes.render(needed)} in /dev/shm, where {sizes.render(free)} are free"
    wanted = f"{2 * needed >> 30 or 1}"
    mount = f"sudo mount -o remount,size={wanted}G /dev/shm (docker run --shm-size {wanted}g …)"
    return f"{room}: {mount}, or use fewer --workers"


def _pause() -> None:
    time.sleep(0.001)


if __name__ == "__main__":
    with ExitStack() as jobs:
        serve(Coordinator(jobs).measure)
