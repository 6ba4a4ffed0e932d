"""Text for people: counts, lists, sizes, suggestions, characters that an encoding lacks; errors; hidden secrets."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numapin import Bind, Memory, Plan, errors
from tests.recorded.screens import compare, compare_answers
from tests.unit.base.seam import (
    counted,
    did_you_mean,
    formats,
    handover,
    is_secret,
    listed,
    not_none,
    say,
    without_none,
    without_secrets,
)

formats.register_stand_ins()


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (counted(0, "rank"), "0 ranks"),
        (counted(1, "rank"), "1 rank"),
        (counted(2, "batch"), "2 batches"),
        (counted(2, "process"), "2 processes"),
        (listed("rank", {3}), "rank 3"),
        (listed("rank", [7, 0, 1]), "ranks 0-1,7"),
        (did_you_mean("--tr", ["--train", "--trace", "--x"]), "; did you mean --train or --trace?"),
        (did_you_mean("--", ["--train", "--trace", "--x"]), ""),
        (did_you_mean("--t", [f"--t{n}" for n in range(9)]), "; did you mean --t8?"),
    ],
)
def test_words(shown: str, text: str) -> None:
    """One is singular; ids are Linux's lists; a beginning suggests few words."""
    assert shown == text


def _size(line: str) -> str:
    try:
        num_bytes = formats.parse_size(line)
    except ValueError as error:
        return f"error: {error}"
    return f"{num_bytes}, shown as {formats.render_size(num_bytes)}"


def test_sizes() -> None:
    """Units are powers of 1024, in any case, with or without B; other text, and a part of a byte, is refused."""
    compare_answers(Path(__file__).with_name("sizes.txt"), _size)


def test_only_none_is_left_out_and_the_order_stays() -> None:
    """Zero, False and empty text are known values; of entries, only values are looked at."""
    assert not_none(iter([3, None, 0, "", False, None, 1])) == [3, 0, "", False, 1]
    assert list(without_none({"b": 0, "x": None, None: "", "a": False}).items()) == [("b", 0), (None, ""), ("a", False)]


@given(st.text(st.characters(exclude_categories=())), st.sampled_from(["ascii", "latin-1", "utf-8", "cp1252"]))
def test_every_text_can_be_encoded(text: str, encoding: str) -> None:
    """No encoding raises, lone surrogates included, and what it has stays."""
    written = text.encode(encoding, formats.STAND_INS)
    if text.isascii():
        assert written == text.encode("ascii")


@pytest.mark.parametrize(
    ("text", "encoding", "written"),
    [
        ("DataLoader(…) ±3%", "ascii", b"DataLoader(...) +-3%"),
        ("±3% …", "latin-1", b"\xb13% ..."),
        ("日本", "latin-1", rb"\u65e5\u672c"),
        ("😀", "ascii", rb"\U0001f600"),
        ("a\udcffb", "utf-8", b"a\xffb"),
        ("\ud800", "utf-8", rb"\ud800"),
    ],
)
def test_stand_ins(text: str, encoding: str, written: bytes) -> None:
    """Our own punctuation is spelled out, names get escapes, and bytes that were not text are themselves again."""
    assert text.encode(encoding, formats.STAND_INS) == written


def test_a_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the program, because any process of a job may write it; a missing, closed or full stderr is ignored."""
    say("rank 1: text")
    assert capsys.readouterr().err == "numapin: rank 1: text\n"
    monkeypatch.setattr(sys, "stderr", None)
    say("lost")
    with Path(os.devnull).open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stderr", file)
    say("lost")
    with Path("/dev/full").open("w", encoding="ascii", buffering=1) as file:
        monkeypatch.setattr(sys, "stderr", file)
        say("lost")
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), file.fileno())  # for what the buffer still has


# --- the error tree: exit statuses, text, pickling -------------------------------------------------------------------


EXIT_CODES = {
    errors.NumapinError: 1,
    errors.UsageError: 2,
    errors.LoaderStateError: 2,
    errors.MachineError: 3,
    errors.MachineFileError: 3,
    errors.LibraryError: 3,
    errors.LibnumaError: 3,
    errors.PlanError: 4,
    errors.BindingRefused: 5,
    errors.RankError: 1,
    errors.Stopped: 1,  # each instance has its signal's
}


def test_every_error_has_its_exit_status() -> None:
    """The table above is the contract, and it lists every error class.

    A rank's error reaches the launcher with all its attributes; there is no empty hint line.
    """
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {kind: getattr(kind, "exit_code", None) for kind in classes} == EXIT_CODES
    for kind in EXIT_CODES.keys() - {errors.Stopped}:
        copy = pickle.loads(pickle.dumps(kind("GPU 9 is not there", "numapin topo")))  # noqa: S301 - our own bytes
        assert (type(copy), copy.message, copy.hint) == (kind, "GPU 9 is not there", "numapin topo")
        assert str(copy) == "GPU 9 is not there\n  hint: numapin topo"
        assert str(kind("no CPU is left")) == "no CPU is left"


# --- command lines without secrets: the lines of redacted.txt, and how they are shown --------------------------------


RECORDED: Final = Path(__file__).with_name("redacted.txt")
S: Final = "Tr0ub4dor-and_3"
"""The secret of the lines."""


def test_lines_are_shown_as_recorded() -> None:
    """Secrets are hidden by the names of their options and variables; counts, names, paths and flags do not change."""
    lines = RECORDED.read_text().splitlines()[::2]
    assert len(lines) > 80
    text = ""
    for line in lines:
        own = shlex.split(line)
        words = without_secrets(own)
        text += f"{line}\n  {shlex.join(words)}\n"
        assert S not in " ".join(words)
        assert all(word == same for word, same in zip(own, words, strict=True) if S not in word)
        assert ("***" in " ".join(words)) == (S in line)
    compare(text, str(RECORDED))


@pytest.mark.parametrize(
    "token",
    [
        *("hf_" + "aB3" * 11, "ghp_" + "aB3" * 12, "sk-proj-" + "aB3" * 12, "AKIA" + "ABCD" * 4, "glpat-" + "aB3-" * 5),
        *("xoxb-" + "1234567890-abc", "eyJhbGciOiJI.eyJzdWIiOiIx.abc-def"),
    ],
)
@pytest.mark.parametrize("form", ["{}", "--model={}", "--note 'x {} y'"])
def test_tokens_are_known_by_their_form(token: str, form: str) -> None:
    """Tokens of a known form are hidden, whatever option has them."""
    hidden = " ".join(without_secrets(shlex.split(form.format(token))))
    assert token not in hidden
    assert "***" in hidden


def test_long_words_take_no_time() -> None:
    """The longest argument that Linux allows, 128 KiB, takes linear time, not quadratic."""
    for word in ("a" * 128_000, "a=" * 64_000, "a:" * 64_000, "://" * 40_000, "-a " * 40_000, '"a":' * 32_000):
        assert len(without_secrets([word])) == 1
    assert not is_secret("-" * 100_000)


def test_the_run_folder_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """command.json, which `verify` and `top` show, has the command line without secrets."""
    monkeypatch.setattr(sys, "argv", ["numapin", "run", "train.py", "--wandb-key", S, f"--token={S}", "--lr", "1"])
    handover.hand_over(Plan(bind=Bind.NODE, memory=Memory.NONE, ranks=()), str(tmp_path), {})
    recorded = json.loads((tmp_path / "command.json").read_text())["argv"]
    assert recorded == ["numapin", "run", "train.py", "--wandb-key", "***", "--token=***", "--lr", "1"]
