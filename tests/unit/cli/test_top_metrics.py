"""`numapin top --openmetrics HOST:PORT`: the metrics before the first sample."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.request import urlopen

from numapin.cli.top_metrics import Address, export

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

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
