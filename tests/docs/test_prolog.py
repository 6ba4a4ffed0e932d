"""The snippets of docs/guides/prolog.md do what the page says, with stand-ins for the programs of a cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kubernetes_validate
import pytest
import yaml

from tests.docs.pages import DOCS, ROOT
from tests.docs.test_pages import check_command_line
from tests.jobs.schemas import versions
from tests.nvml.fake import FakeGpu, render

if TYPE_CHECKING:
    from tests.nvml.fake import FakeNvml

_PAGE: Final = (DOCS / "guides" / "prolog.md").read_text()
_NUMAPIN: Final = "/opt/numapin/bin/numapin"
_HOST: Final = "/etc/numapin/host.json"
_GPUS: Final = [
    FakeGpu(uuid=f"GPU-{n}", pci=f"00000000:{n + 1}B:00.0", ecc=(0, 0), rows=(0, 0), reasons=0) for n in range(2)
]
_SILENT: Final = [replace(gpu, fails={"ecc": 4}) for gpu in _GPUS]


def _snippet(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def _program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


class Cluster:
    """A host with two GPUs that was saved when it was sound, and programs that note how they are called."""

    def __init__(self, folder: Path, fake_nvml: FakeNvml) -> None:
        self._folder, self._fake_nvml = folder, fake_nvml
        self._saved, self._calls = folder / "host.json", folder / "calls.txt"
        self._numapin = _program(folder / "numapin", f'cd {ROOT} && exec {sys.executable} -m numapin "$@"')
        note = f'[ "$*" != "logger -t numapin" ] || set -- "$@" "$(cat)"\necho "$@" >> {self._calls}'
        self._note = _program(folder / "note", note)
        subprocess.run([self._numapin, "topo", "--save", str(self._saved)], env=self._environ(_GPUS), check=True)

    def _environ(self, gpus: list[FakeGpu]) -> dict[str, str]:
        environ = self._fake_nvml.environment(self._folder, render(gpus))
        kept = {name: environ[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_DATA")}
        return {**kept, "SLURMD_NODENAME": "node7"}  # prologs have no PATH

    def run(self, script: str, gpus: list[FakeGpu]) -> tuple[int, str]:
        """Run a script on a host with these GPUs; return the status, and how the cluster's programs were called."""
        for name, stand_in in (
            (_NUMAPIN, self._numapin),
            (_HOST, str(self._saved)),
            ("/usr/bin/scontrol", f"{self._note} scontrol"),
            ("/usr/bin/logger", f"{self._note} logger"),
        ):
            script = script.replace(name, stand_in)
        script = re.sub(r"--only \S+", "--only ecc", script)  # the other checks look at this host, which may be unfit
        self._calls.write_text("")
        bash = shutil.which("bash") or "/bin/bash"
        done = subprocess.run([bash, "-c", script], env=self._environ(gpus), capture_output=True, check=False)
        assert done.stderr == b"" or b" Killed " in done.stderr  # bash reports what SIGKILL has ended
        return done.returncode, self._calls.read_text()


@pytest.fixture(scope="module")
def cluster(fake_nvml: FakeNvml, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"), fake_nvml)


_SCRIPT: Final = _snippet("bash")


_MISSING: Final = r".*1 error.*Start with expect: gpus: 1 instead of 2.*"
_SILENCE: Final = "numapin doctor did not answer within 60 s"


def test_a_sound_host(cluster: Cluster) -> None:
    """The job starts, and nothing is logged or asked of Slurm."""
    assert cluster.run(_SCRIPT, _GPUS) == (0, "")


@pytest.mark.parametrize(
    ("program", "log", "reason"),
    [
        ("", r".*\(missing: 0000:2b:00\.0\).*", _MISSING),
        # A report that is too long for an argument, with a first paragraph of two lines.
        (
            "printf 'Start\nhere.\n\n'; yes 'a line' | head -n 20000; echo last; exit 1",
            r"Start\n.*last",
            r"Start here\.",
        ),
        ("echo so far; sleep 30", f"{_SILENCE}.*so far.*", _SILENCE),
        ("echo so far; trap '' TERM; while :; do sleep 0.1; done", f"{_SILENCE}.*so far.*", _SILENCE),
    ],
    ids=["lost-gpu", "long-report", "no-answer", "no-answer-to-sigterm"],
)
def test_a_host_that_is_drained(program: str, log: str, reason: str, cluster: Cluster, tmp_path: Path) -> None:
    """The log has the whole report, and the reason is its first paragraph, with the lines joined."""
    ours = _program(tmp_path / "numapin", program) if program else _NUMAPIN
    script = _SCRIPT.replace(_NUMAPIN, ours).replace("-k 5 60", "-k 0.2 2" if _SILENCE in reason else "-k 5 60")
    status, calls = cluster.run(script, _GPUS[:1])
    drained = f"scontrol update NodeName=node7 State=DRAIN Reason=numapin: {reason}\n"
    assert status == 1
    assert re.fullmatch(rf"logger -t numapin {log}\n{drained}", calls, re.DOTALL), calls[-500:]


@pytest.mark.parametrize(
    ("old", "new", "log"),
    [
        (_HOST, "/gone/host.json", r"status 3: numapin: error: .*"),
        # Python ends with status 1 then, too, but without a report.
        (f"{_NUMAPIN} doctor", f"{sys.executable} -m numapin.gone", r"status 1: .*No module named numapin\.gone.*"),
        ("/usr/bin/mktemp -d", "false", r"no temporary folder\n"),
    ],
    ids=["no-saved-state", "broken-numapin", "no-temporary-folder"],
)
def test_a_host_that_cannot_be_checked(old: str, new: str, log: str, cluster: Cluster) -> None:
    """The job starts, and the log has the error, even below a site's `set -eu`."""
    status, calls = cluster.run("set -eu\n" + _SCRIPT.replace(old, new), _GPUS[:1])
    assert (status, "scontrol" in calls) == (0, False)
    assert re.fullmatch(f"logger -t numapin {log}", calls, re.DOTALL), calls


def test_processes_that_stay(cluster: Cluster, tmp_path: Path) -> None:
    """Neither a process that cannot be killed nor one that is left behind holds up the prolog."""
    pids = [tmp_path / "left.pid", tmp_path / "stuck.pid"]
    left = _program(tmp_path / "left", f"echo found; sleep 250 & echo $! > {pids[0]}; exit 1")
    stuck = _program(tmp_path / "stuck", f"echo $$ > {pids[1]}; exec sleep 250")
    assert cluster.run(_SCRIPT.replace(_NUMAPIN, left), _GPUS)[0] == 1
    status, calls = cluster.run(_SCRIPT.replace(_NUMAPIN, stuck).replace("{1..700}", "{1..20}"), _GPUS)
    assert status == 1
    assert "Reason=numapin: numapin doctor did not answer within 60 s\n" in calls
    for pid in pids:
        os.kill(int(pid.read_text()), signal.SIGKILL)  # which finds the process: nothing has waited for its end


def test_the_command_is_real_and_shellcheck_finds_nothing() -> None:
    """The options of the command exist, and so do the checks."""
    (command,) = re.findall(rf"{_NUMAPIN} (.*?) >\"", _SCRIPT.replace("\\\n", " "))
    check_command_line(shlex.split(command))
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on PATH; type: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", "-"], input=_SCRIPT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_check_without_an_answer(cluster: Cluster) -> None:
    """The line with jq fails for it, although doctor does not, and without a report, but not for a sound host."""
    if not shutil.which("jq"):
        pytest.skip("no jq on PATH; type: apt-get install jq")
    (line,) = re.findall(r"`numapin (doctor .*jq .*)`", _PAGE)
    assert [cluster.run(f"{_NUMAPIN} {line}", gpus)[0] for gpus in (_GPUS, _SILENT)] == [0, 1]
    assert cluster.run(f"true {line[line.index('|') :]} 2> /dev/null", _GPUS)[0] != 0
    check_command_line(shlex.split(line.partition(" | ")[0]))


def test_node_health_check(cluster: Cluster) -> None:
    """The line fails where the host differs; NHC's check runs the command and compares its status."""
    hosts, line = _snippet("text").strip().split(" || ", 1)
    assert hosts == "*"
    script = f'check_cmd_status() {{ [ "$1 $3 $4" = "-t -r 0" ] && shift 4 && "$@" >& /dev/null; }}\n{line}'
    assert cluster.run(script, _GPUS)[0] == 0
    assert cluster.run(script, _GPUS[:1])[0] == 1
    assert cluster.run(script.replace(_HOST, "/gone/host.json"), _GPUS)[0] == 3
    check_command_line(shlex.split(line.partition(f"{_NUMAPIN} ")[2]))


def test_kubernetes() -> None:
    """The init container has its place in a pod of every known version, and its command exists."""
    snippet: dict[str, Any] = yaml.safe_load(_snippet("yaml"))
    (container,) = snippet["initContainers"]
    program, *words = container["command"]
    assert program == "numapin"
    check_command_line(words)
    main = {"name": "main", "image": "registry/image:tag"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job"}, "spec": {**snippet, "containers": [main]}}
    for version in versions():
        kubernetes_validate.validate(pod, version, strict=True)
