"""`numapin top --openmetrics`: where the metrics go, and those before the first sample."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest

from numapin.cli.top_metrics import Address, export, target_of
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.observe.top import Top


def test_nothing_is_served_before_the_first_sample(capfd: pytest.CaptureFixture[str]) -> None:
    """A live job is not reported as inactive: the answer is valid, and has no metric."""
    answers = []

    def samples() -> Iterator[Top]:
        url = re.search(r"http://\S+", capfd.readouterr().err)
        assert url is not None
        with urlopen(url[0], timeout=10) as answer:  # noqa: S310 - this process serves it
            answers.append(answer.read())
        yield from ()

    export(samples(), "run-x", Address("127.0.0.1", 0), once=False)
    assert answers == [b"# EOF\n"]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("-", None),
        ("localhost:9836", Address("127.0.0.1", 9836)),
        (":0", Address("127.0.0.1", 0)),
        ("[::1]:9836", Address("::1", 9836)),
        ("numapin.prom", Path("numapin.prom")),
        ("./localhost:x", Path("localhost:x")),
        ("run:x.prom", Path("run:x.prom")),
        ("run:20261123", Path("run:20261123")),
    ],
)
def test_a_file_or_an_address(text: str, target: Path | Address | None) -> None:
    """A loopback address with a port is served, and any other text without a port is a file."""
    assert target_of(text) == target


@pytest.mark.parametrize(
    "text",
    ["localhost:x", "localhost:", "localhost:99999", "localhost:999999", "127.0.0.1:98a", "[::1]:x", ":x", "a:80"],
)
def test_a_malformed_address(text: str) -> None:
    """It is an error, not a file of this name; the hint has the name that the file would need."""
    with pytest.raises(UsageError, match="not a port of a loopback address") as caught:
        target_of(text)
    assert f"./{text}" in caught.value.hint
