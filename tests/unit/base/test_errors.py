"""The error tree: exit statuses, text, pickling."""

from __future__ import annotations

import pickle
import signal

import pytest

from numapin import errors

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
    """The table above is the contract, and it lists every error class."""
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {kind: getattr(kind, "exit_code", None) for kind in classes} == EXIT_CODES


@pytest.mark.parametrize("kind", [kind for kind in EXIT_CODES if kind is not errors.Stopped])
def test_errors_pickle_with_message_and_hint(kind: type[errors.NumapinError]) -> None:
    """A rank's error reaches the launcher with all its attributes."""
    copy = pickle.loads(pickle.dumps(kind("GPU 9 is not there", "numapin topo")))  # noqa: S301 - our own bytes
    assert type(copy) is kind
    assert (copy.message, copy.hint) == ("GPU 9 is not there", "numapin topo")
    assert str(copy) == "GPU 9 is not there\n  hint: numapin topo"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_pickles_with_its_signal(number: signal.Signals) -> None:
    """Its exit status is what a shell shows for the signal."""
    copy = pickle.loads(pickle.dumps(errors.Stopped(number)))  # noqa: S301 - our own bytes
    assert (copy.number, copy.exit_code, copy.hint) == (number, 128 + number, "")
    assert copy.message == f"stopped by {number.name}; all ranks have ended"


def test_without_a_hint_the_text_is_the_message() -> None:
    """There is no empty hint line."""
    assert str(errors.PlanError("no CPU is left")) == "no CPU is left"
