"""Lines of ranks' files on the launcher's streams."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from numapin.errors import UsageError
from tests.unit.launcher.seam import HostPlace, Logs, parse
from tests.waiting import wait_until

ONE = HostPlace(0, 1, 1, 0, 1, 0, 1, "127.0.0.1", 1, "job")


@pytest.mark.parametrize(
    ("options", "variable", "begins"),
    [
        ((), "", "[trainer1]:"),
        (
            ("--log-line-prefix-template", "${rank}@${hostname}/${local_rank} $x "),
            "ignored",
            f"5@{os.uname().nodename}/1 $x ",
        ),
        ((), "${role_name} ${rank}> ", "trainer 5> "),
    ],
)
def test_how_lines_begin(
    options: tuple[str, ...], variable: str, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torch's template says: the option first, then the variable; this host's ranks begin at 4 here."""
    words = ["--tee", "1:1", "--role", "trainer", "--log-dir", str(tmp_path / "logs"), *options, "train.py"]
    logs = Logs(parse(words, {}, {}, python="python3", prog="numapin run"))
    place = HostPlace(1, 2, 2, 4, 6, 4, 6, "127.0.0.1", 1, "job")
    with mock.patch.dict(os.environ, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=variable):
        files = logs.begin(0, place, str(tmp_path))
        Path(files[1].stdout).write_text("a step\nanother\n")
        logs.close()
    assert capsys.readouterr().out == f"{begins}a step\n{begins}another\n"


@pytest.mark.parametrize("run_id", ["none", "team/job", "../job"])
def test_all_attempts_have_one_folder(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, also if --log-dir is relative; a rank that changes its folder still finds its error file."""
    monkeypatch.chdir(tmp_path)
    words = ["--log-dir", "logs/", "--rdzv-id", run_id, "train.py"]
    logs = Logs(parse(words, {}, {}, python="python3", prog="numapin run"))
    errors = [Path(logs.begin(attempt, ONE, str(tmp_path))[0].error) for attempt in (0, 1)]
    (folder,) = tmp_path.glob("logs/*")
    assert errors == [folder / f"attempt_{attempt}" / "0" / "error.json" for attempt in (0, 1)]


def test_the_folder_of_an_attempt_is_emptied_and_no_other(tmp_path: Path) -> None:
    """Files of ranks that started before are removed; what a link in the place of the folder leads to stays."""
    logs = Logs(parse(["--log-dir", str(tmp_path / "logs"), "train.py"], {}, {}, python="python3", prog="numapin run"))
    own = Path(logs.begin(0, ONE, str(tmp_path))[0].error).parent
    (own / "old").touch()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "0").mkdir(parents=True)
    (elsewhere / "0" / "kept").touch()
    (own.parents[1] / "attempt_1").symlink_to(elsewhere)
    for attempt in (0, 1):
        logs.begin(attempt, ONE, str(tmp_path))
    assert not (own / "old").exists()
    assert (elsewhere / "0" / "kept").exists()


def test_a_log_that_cannot_be_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The thread of --tee names it, and shows the others."""
    logs = Logs(parse(["--tee=3", "train.py"], {}, {}, python="python3", prog="numapin run"))
    with mock.patch.object(Logs, "_show") as show:
        (own,) = logs.begin(0, ONE, str(tmp_path))
        logs.close()
    Path(own.stdout).mkdir()
    Path(own.stderr).write_text("a step\n")
    Logs._show(logs, *show.call_args.args)
    err = capfd.readouterr().err
    assert f"numapin: no lines of {own.stdout} are shown: Is a directory\n" in err
    assert err.endswith("[default0]:a step\n")


def test_an_error_of_a_former_round(tmp_path: Path) -> None:
    """When hosts join, ranks start again without a new attempt: what the former ones recorded is not theirs."""
    logs = Logs(parse(["train.py"], {}, {}, python="python3", prog="numapin run"))
    for _ in range(2):
        (own,) = logs.begin(0, ONE, str(tmp_path))
        assert not Path(own.error).exists()
        Path(own.error).touch()


def test_a_stream_that_takes_no_more_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind `| head`, one line says where all output is; the other stream, and the filters, go on."""
    words = ["--tee=3", "--duplicate-stdout-filters=line", "--log-dir", str(tmp_path / "logs"), "train.py"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        logs = Logs(parse(words, {}, {}, python="python3", prog="numapin run"))
        (own,) = logs.begin(0, ONE, str(tmp_path))
        Path(own.stdout).write_text("line 1\nline 2\n")
        Path(own.stderr).write_text("an error\n")
        logs.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # it is flushed when it is closed
    (folder,) = tmp_path.glob("logs/*")
    said = f"numapin: no more lines are shown on stdout: Broken pipe; all are in {folder}\n"
    assert capsys.readouterr().err == f"{said}[default0]:an error\n"
    assert (folder / "attempt_0" / "filtered_stdout.log").read_text() == "[default0]:line 1\n[default0]:line 2\n"


def test_a_rank_that_writes_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the others are shown meanwhile."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    logs = Logs(parse(["--tee=1", "train.py"], {}, {}, python="python3", prog="numapin run"))
    much, little = logs.begin(0, ONE._replace(num_ranks=2), str(tmp_path))
    Path(little.stdout).write_text("a step\n")
    Path(much.stdout).write_text("a line\n" * 300_000)
    assert wait_until(lambda: "a step" in shown.getvalue(), limit_s=60)
    logs.close()
    lines = shown.getvalue().splitlines()
    assert lines.index("[default1]:a step") < 200_000 < len(lines) == 300_001


def test_a_process_that_a_rank_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write without an end: the job ends when what the ranks wrote has been shown."""

    class Answered(io.StringIO):
        def write(self, text: str) -> int:
            if len(self.getvalue()) < 500_000:
                with Path(own.stdout).open("a") as file:
                    file.write("more\n")
            return super().write(text)

    shown = Answered()
    monkeypatch.setattr(sys, "stdout", shown)
    logs = Logs(parse(["--tee=1", "train.py"], {}, {}, python="python3", prog="numapin run"))
    (own,) = logs.begin(0, ONE, str(tmp_path))
    Path(own.stdout).write_text("a step\n" * 20_000)
    logs.close()
    assert shown.getvalue().count("a step") == 20_000
    assert shown.getvalue().count("more") < 100


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Names the folder and the reason, and the option that chooses another one."""
    (tmp_path / "file").touch()
    line = ["--log-dir", f"{tmp_path}/file/logs", "train.py"]
    with pytest.raises(UsageError, match=f"can be made in {tmp_path}/file/logs: Not a directory") as caught:
        Logs(parse(line, {}, {}, python="python3", prog="numapin run")).begin(0, ONE, str(tmp_path))
    assert "--log-dir DIR" in caught.value.hint
