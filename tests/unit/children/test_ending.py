"""What the end of `numapin exec --children` says about the records in the run's folder, and its status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.unit.children.below import table
from tests.unit.children.seam import conclude

if TYPE_CHECKING:
    from pathlib import Path


def _bound(folder: Path, pid: int, *gpus: str) -> None:
    content = {"local_rank": 0, "pid": pid, "gpus": gpus, "surprises": []}
    (folder / f"observed-0-{pid}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["observed-0-7.json", "unbound-7.json"])
@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_a_record_that_cannot_be_read(
    kind: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that goes between its listing and its reading, or is malformed, does not change the command's status."""
    if text is None:
        (tmp_path / kind).symlink_to(tmp_path / "gone")
    else:
        (tmp_path / kind).write_text(text)
    _bound(tmp_path, 8, "GPU 0")
    assert conclude(table(tmp_path, verbose=True), 7) == 7
    assert "1 process used 1 GPU and was bound" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([("GPU 0", "GPU 1")], "1 process used 2 GPUs and was bound"),
        ([("GPU 0", "GPU 1"), ("GPU 0",)], "2 processes used 2 GPUs and were bound"),
    ],
)
def test_processes_with_several_gpus(
    gpus: list[tuple[str, ...]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each GPU is counted once, whichever process used it first."""
    for pid, names in enumerate(gpus, start=1):
        _bound(tmp_path, pid, *names)
    assert conclude(table(tmp_path, verbose=True), 0) == 0
    assert words in capsys.readouterr().err


def test_nothing_was_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line says what numapin cannot see: processes that never import torch leave no record."""
    assert conclude(table(tmp_path), 0) == 0
    assert "no Python process below the command was seen to use a GPU, so none was bound" in capsys.readouterr().err
