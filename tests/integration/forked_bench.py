"""`numapin` whose benchmarks' measuring processes are forks of it, with torch imported, instead of new processes.

Tests of how the measuring processes start use the real command. See launching.py.
"""

from __future__ import annotations

import os
import subprocess
import traceback
import weakref
from functools import partial
from typing import Any, Final, NoReturn

from tests.integration.forking import leave
from tests.integration.seam import main, process

_MOST_DESCRIPTORS: Final = 4096


class _Fork(subprocess.Popen[bytes]):
    """A process that runs code, without a new interpreter."""

    def __init__(self, code: str, **options: Any) -> None:
        super().__init__(["true"], preexec_fn=partial(_become, code), **options)


def _become(code: str) -> NoReturn:
    """Run code instead of the command. Popen waits until the pipe is closed on which it would report errors."""
    os.closerange(3, _MOST_DESCRIPTORS)
    for finalizer in [*vars(weakref.finalize)["_registry"]]:
        finalizer.detach()  # else this process's end would remove the harness's temporary folders
    try:
        exec(code, {})  # noqa: S102 - of numapin
        leave(0)
    except BaseException:  # noqa: BLE001 - Popen would not show it
        traceback.print_exc()
    os._exit(1)


class _Subprocess:
    PIPE = subprocess.PIPE
    TimeoutExpired = subprocess.TimeoutExpired
    Popen = _Fork


if __name__ == "__main__":
    vars(process).update(subprocess=_Subprocess, running=str)
    main()
