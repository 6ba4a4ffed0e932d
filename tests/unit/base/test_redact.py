"""Command lines without secrets: values that are hidden, and values that must stay readable."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Memory, Plan
from tests.unit.base.seam import handover, is_secret, without_secrets

if TYPE_CHECKING:
    from pathlib import Path

S = "Tr0ub4dor-and_3"


@pytest.mark.parametrize(
    "line",
    [
        f"--api-key {S}",
        f"--api_key={S}",
        f"--apikey {S}",
        f"--apiKey={S}",
        f"-api-key {S}",
        f"--token={S}",
        f"--token {S} --lr 1",
        f"--hf-token {S}",
        f"--hub_token={S}",
        f"--use-auth-token {S}",
        f"--password {S}",
        f"--db-passwd={S}",
        f"--passphrase {S}",
        f"--secret {S}",
        f"--client-secret={S}",
        f"--wandb-key {S}",
        f"--wandb_api_key={S}",
        f"--private-key={S}",
        f"--api-keys {S},{S}",
        f"--auth me:{S}",
        f"--credentials={S}",
        f"HF_TOKEN={S} python train.py",
        f"WANDB_API_KEY={S}",
        f"AWS_SECRET_ACCESS_KEY={S}",
        f"AWS_SESSION_TOKEN={S}",
        f"OPENAI_API_KEY={S}",
        f"PGPASSWORD={S}",
        f"MYSQL_PWD={S}",
        f"wandb.api_key={S}",
        f"+logger.wandb.apiKey={S}",
        f"secrets.anything={S}",
        f"bash -c 'HF_TOKEN={S} python train.py --token {S} x'",
        f'bash -c \'export TOKEN="{S}"; --password="{S} {S}"\'',
        f'--config \'{{"api_key": "{S}", "lr": 1}}\'',
        f"--data postgres://me:{S}@host:5432/db",
        f"--data=https://me:{S}@host/x?y=1",
        f"--repo https://{S}@github.com/a/b",
        f"https://host/path?api_key={S}&x=1",
        f"https://host/path?x=1&token={S}",
        f"--header 'Authorization: Bearer {S}'",
        f"--header 'X-Api-Key: {S}'",
        f"redis://:{S}@host",
        f"redis://:{S}@{S}@host",
    ],
)
def test_hidden(line: str) -> None:
    """The secret is gone, and the number of words and all other words are unchanged."""
    words = shlex.split(line)
    hidden = without_secrets(words)
    assert S not in " ".join(hidden)
    assert "***" in " ".join(hidden)
    assert len(hidden) == len(words)
    assert all(word == same for word, same in zip(words, hidden, strict=True) if S not in word)


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


@pytest.mark.parametrize(
    "line",
    [
        "--tokenizer gpt2",
        "--tokenizer-path=/models/t",
        "--max-tokens 512",
        "--max_new_tokens=512",
        "--num-tokens 2B",
        "--tokens 10",
        "--max-token 512",
        "--pad-token '<pad>'",
        "--eos_token=</s>",
        "--image-token x",
        "--tokens-per-batch 4096",
        "--key-size 128",
        "--num-keys 4",
        "--num-key-value-heads 8",
        "--sort-key name",
        "--image_key=jpg",
        "--kv-key a",
        "--api-key-file /run/secrets/key",
        "--token-path=/home/me/.token",
        "--password-file pw.txt",
        "--secret-name=s",
        "--use-auth-token true",
        "--use-auth-token=False",
        "--token --lr 1",
        "--passes 3",
        "--num-pass 3",
        "--author me",
        "--monkey x",
        "--turkey=1",
        "--keyframes 5",
        "PWD=/home/me",
        "--pwd /home/me",
        "--data s3://bucket/key=1/x",
        "--data https://host:8080/x?y=1",
        "--rdzv-endpoint head:29500",
        "--repo ssh://git@github.com/a/b",
        "git@github.com:a/b",
        "--lr 0.1 train.py config.yaml",
        "0:lambda",
        "-",
    ],
)
def test_kept(line: str) -> None:
    """Counts, names, paths and flags do not change."""
    assert without_secrets(shlex.split(line)) == shlex.split(line)


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
