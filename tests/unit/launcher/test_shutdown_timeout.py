"""--shutdown-timeout: torch's own option, and ours on a torch that has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch.distributed import run as torch_run

from numapin.cli.run import make_run_parser
from numapin.errors import UsageError
from numapin.launcher.torchrun import parse

if TYPE_CHECKING:
    import argparse


@pytest.fixture(params=["torch's", "ours"])
def _torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For "ours", remove the option from torch's parser, as in older torches."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    whole = torch_run.get_args_parser

    def without() -> argparse.ArgumentParser:
        parser = whole()
        for action in [a for a in parser._actions if a.dest == "shutdown_timeout"]:
            parser._remove_action(action)
            for name in action.option_strings:
                del parser._option_string_actions[name]
        return parser

    if request.param == "ours":
        monkeypatch.setattr(torch_run, "get_args_parser", without)


def seconds(*arguments: str) -> int | None:
    """Return the timeout that a command line gives."""
    parser = make_run_parser()
    return parse([*arguments, __file__], parser).shutdown_timeout_s


@pytest.mark.usefixtures("_torch")
class TestShutdownTimeout:
    """The same on every torch."""

    def test_option(self) -> None:
        """Both spellings give seconds; without them torch decides."""
        assert seconds("--shutdown-timeout", "7") == seconds("--shutdown_timeout=7") == 7
        assert seconds() is None

    def test_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """PET_SHUTDOWN_TIMEOUT counts like the option; torch's variable counts without both."""
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9")
        assert seconds() == 9
        monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "8")
        assert seconds() == 8

    def test_what_cannot_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Negative seconds, and a variable that is not a number, are refused."""
        with pytest.raises(UsageError, match="negative"):
            seconds("--shutdown-timeout=-1")
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
        with pytest.raises(UsageError, match="invalid literal"):
            seconds()
