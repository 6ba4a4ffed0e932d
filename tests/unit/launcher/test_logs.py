"""Lines of ranks' files on the launcher's streams."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from numapin.errors import UsageError
from tests.unit.launcher.seam import HostPlace, Logs, parse


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


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Names the folder and the reason, and the option that chooses another one."""
    place = HostPlace(0, 1, 2, 0, 2, 0, 2, "127.0.0.1", 1, "job")
    (tmp_path / "file").touch()
    line = ["--log-dir", f"{tmp_path}/file/logs", "train.py"]
    with pytest.raises(UsageError, match=f"can be made in {tmp_path}/file/logs: Not a directory") as caught:
        Logs(parse(line, {}, {}, python="python3", prog="numapin run")).begin(0, place, str(tmp_path))
    assert "--log-dir DIR" in caught.value.hint
