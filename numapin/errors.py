"""The error tree. Every error says what failed, on what, and what was seen; its hint is the next command to type.

::

    NumapinError               exit status 1
    ├── UsageError             2   an option or a value is invalid
    │   └── LoaderStateError   2   a numapin.DataLoader was asked for its state: it has none
    ├── MachineError           3   the machine cannot be read
    │   ├── MachineFileError   3   a machine file is malformed: names the file and the line or element
    │   └── LibraryError       3   a shared library is missing, or lacks a function
    │       └── LibnumaError   3   libnuma is missing or refuses to work
    ├── PlanError              4   no feasible plan
    ├── BindingRefused         5   the kernel refused a binding under --strict
    ├── RankError              1   a rank failed: names the rank
    └── Stopped          128 + n   signal n stopped the launcher, and all ranks have ended
"""

from __future__ import annotations

from numapin.base.text import printable_lines

TYPE_CHECKING = False  # each rank imports this before its program starts
if TYPE_CHECKING:
    from signal import Signals


class NumapinError(Exception):
    """A failure that is reported to the user. It can be pickled, because errors cross process boundaries.

    Args:
        message: What failed, on what, and what was seen.
        hint: The next command to type, or the remedy.

    Attributes:
        exit_code: The exit status of a command that fails with this error.

    Example:
        ```python
        import numapin

        try:
            numapin.discover(gpu_nodes=[("0", 99)])
        except numapin.NumapinError as error:
            print(error.message, error.hint)
        ```
    """

    exit_code = 1
    block: tuple[str, ...] = ()  # lines that the command line prints in place of message and hint

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the message and, on a second line, the hint, safe to print on a terminal."""
        return printable_lines(f"{self.message}\n  hint: {self.hint}" if self.hint else self.message)


class UsageError(NumapinError):
    """An option or a value names something that does not exist, or contradicts another (exit status 2)."""

    exit_code = 2


class LoaderStateError(UsageError, AttributeError):
    """A `numapin.DataLoader` was asked for a state; `numapin.StatefulDataLoader` has one.

    It is an AttributeError, so that frameworks that look for `state_dict` find none.
    """


class MachineError(NumapinError):
    """The machine, or a description of one, cannot be read (exit status 3)."""

    exit_code = 3


class MachineFileError(MachineError):
    """A machine file is malformed; the message names the file and the line or element."""


class LibraryError(MachineError):
    """A shared library is missing, or lacks a function."""


class LibnumaError(LibraryError):
    """libnuma is missing, or a call into it failed."""


class PlanError(NumapinError):
    """No plan satisfies the request on this machine (exit status 4)."""

    exit_code = 4


class BindingRefused(NumapinError):  # noqa: N818 - named after the event, like asyncio.CancelledError
    """The kernel refused a binding, and `--strict` was given (exit status 5)."""

    exit_code = 5


class RankError(NumapinError):
    """A rank failed; the message names it. From `numapin.spawn`, the message contains the rank's traceback."""


class Stopped(NumapinError):  # noqa: N818 - the event, as in BindingRefused
    """A signal stopped the launcher, and all ranks have ended (exit status: 128 plus the signal's number).

    If a rank had failed before, the error about that is the cause of this one.

    Attributes:
        number: The signal. On SIGINT the command line dies of it, so that a shell's loop ends, too.
        left: Which ranks have not ended, although they were killed. "": all have.
    """

    def __init__(self, number: Signals, left: str = "") -> None:
        super().__init__(f"stopped by {number.name}; {left or 'no rank is running'}")
        self.number = number
        self.left = left
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what the message is made of."""
        return type(self), (self.number, self.left)
