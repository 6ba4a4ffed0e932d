"""Command lines without secrets: the lines of redacted.txt, and how they are shown.

NUMAPIN_UPDATE_GOLDEN=1 writes the shown lines anew, each below its own.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Final

import pytest

from numapin import Bind, Memory, Plan
from tests.recorded.screens import compare
from tests.unit.base.seam import handover, is_secret, without_secrets

RECORDED: Final = Path(__file__).with_name("redacted.txt")
S: Final = "Tr0ub4dor-and_3"
"""The secret of the lines."""


def test_lines_are_shown_as_recorded() -> None:
    """Secrets are hidden by the names of their options and variables; counts, names, paths and flags do not change."""
    lines = RECORDED.read_text().splitlines()[::2]
    assert len(lines) > 80
    shown = [without_secrets(shlex.split(line)) for line in lines]
    compare(
        "".join(f"{line}\n  {shlex.join(words)}\n" for line, words in zip(lines, shown, strict=True)), str(RECORDED)
    )
    for line, words in zip(lines, shown, strict=True):
        own = shlex.split(line)
        assert len(words) == len(own)
        assert S not in " ".join(words)
        assert all(word == same for word, same in zip(own, words, strict=True) if S not in word)
        assert ("***" in " ".join(words)) == (S in line)


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "aB3" * 11,
        "ghp_" + "aB3" * 12,
        "sk-proj-" + "aB3" * 12,
        "AKIA" + "ABCD" * 4,
        "xoxb-" + "1234567890-abc",
        "glpat-" + "aB3-" * 5,
        "eyJhbGciOiJI.eyJzdWIiOiIx.abc-def",
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
