"""Hints of errors: each can be followed where it is shown; the notes of `numapin trace --read`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from numapin.errors import UsageError
from tests.trace.made import loop, record
from tests.unit.cli import seam
from tests.unit.cli.seam import numapin as commands
from tests.unit.cli.seam import read_report


def _error(*words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        commands.main(list(words), standalone_mode=False)
    return caught.value


def test_a_number_of_gpus_for_children() -> None:
    """`exec --children` takes no --nproc-per-node, so the hint for --gpus 900 does not name it."""
    error = _error("exec", "--children", "--gpus", "900", "--", "true")
    assert "no GPU matches '900'" in error.message
    assert "--nproc-per-node" not in error.hint


@pytest.mark.parametrize(("line", "hint"), [(("--pid", "7"), "pgrep -af"), ((), "are being restarted")])
def test_a_job_that_ends_while_verify_reads_it(
    line: tuple[str, ...], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that were given by their ids need not be of a run, so the hint is how to list processes."""
    verify = seam.verify
    monkeypatch.setattr(verify, "find_job", lambda *_, **__: SimpleNamespace(name="x", pids={}, gone=frozenset()))
    monkeypatch.setattr(verify, "verify_running", lambda _: SimpleNamespace(ranks=()))
    error = _error("verify", *line)
    assert error.message == "x: all of its ranks have ended"
    assert hint in error.hint


# --- what `numapin trace --read` reports about ranks without a trace -------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "said"), [(4, "3 of 4 ranks took no batch and made no step"), (1, "")])
def test_ranks_without_any_step(tmp_path: Path, num_ranks: int, said: str) -> None:
    """Ranks that left no record are counted in a note: the hook records a rank at its first batch or step."""
    (tmp_path / "rank-0.trace.json").write_text(json.dumps(loop(compute=100).content()))
    (tmp_path / "rank-0.json").write_text(record(0, num_local_ranks=num_ranks, trace="rank-0.trace.json"))
    notes = [note for note in read_report((tmp_path,)).notes if "took no batch" in note]
    assert notes == ([f"{tmp_path}: {said}"] if said else [])


def test_records_of_ranks(tmp_path: Path) -> None:
    """A record that cannot be read, and why a rank was not traced, are notes."""
    (tmp_path / "rank-0.trace.json").write_text(json.dumps(loop(compute=100).content()))
    (tmp_path / "rank-0.json").write_text(record(0, reason="it forked", trace="rank-0.trace.json", num_traced=4))
    (tmp_path / "rank-1.json").mkdir()
    (tmp_path / "rank-2.json").write_text("{}")
    notes = [note for note in read_report((tmp_path,)).notes if note.startswith("rank ")]
    assert notes[0] == "rank 0: it forked, 4 steps traced"
    assert "rank-1.json: " in notes[1]
    assert notes[2].startswith("rank 2: rank-2.json: schema: expected 'numapin.steps/1'")


def test_an_empty_folder_beside_a_trace(tmp_path: Path) -> None:
    """Each path that the user names must have a trace: a figure for fewer than were named would mislead."""
    empty, file = tmp_path / "empty", tmp_path / "ok.json"
    empty.mkdir()
    file.write_text(json.dumps(loop(compute=100).content(rank=None)))
    assert read_report((file,)).notes == read_report((file, file)).notes
    with pytest.raises(UsageError, match="empty"):
        read_report((file, empty))
