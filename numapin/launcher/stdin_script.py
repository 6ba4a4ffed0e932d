"""A script on stdin: `numapin run - < train.py`.

Under torchrun all ranks read the one stdin: one of them gets the script, the others and all restarted ones get nothing
and succeed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from numapin.errors import UsageError
from numapin.rank.shim import is_stdin_script

if TYPE_CHECKING:
    from collections.abc import Sequence

_STDIN = 0
_BLOCK_BYTES = 1 << 20


def keep_script(command: Sequence[str]) -> None:
    """If the ranks run a script from stdin, read it to its end and make the copy this process's stdin.

    Raises UsageError if stdin cannot have a script.
    """
    if not is_stdin_script(command[1:]):
        return
    if os.isatty(_STDIN):
        raise UsageError("the script - is read from stdin, which is a terminal", "numapin run - < train.py")
    copy = os.memfd_create("numapin-script")
    try:
        with os.fdopen(copy, "wb", closefd=False) as file:
            while block := os.read(_STDIN, _BLOCK_BYTES):
                file.write(block)
        os.lseek(copy, 0, os.SEEK_SET)
        os.dup2(copy, _STDIN)
    except OSError as error:
        raise UsageError(
            f"the script - cannot be read from stdin: {error.strerror}", "numapin run - < train.py"
        ) from None
    finally:
        os.close(copy)
