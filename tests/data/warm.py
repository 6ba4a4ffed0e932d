"""Scripts that run in forks of one process which has torch imported: that takes 1.5 s of CPU time."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from tests.integration.forking import CommandLine, Forker

ROOT: Final = Path(__file__).resolve().parents[2]
ENVIRON: Final = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


@cache
def forker() -> Forker:
    made = Forker(ENVIRON, ("torch.utils.data",))
    atexit.register(made.close)
    return made


def run_script(folder: Path, text: str, arguments: Sequence[str] = ()) -> tuple[int, str, str]:
    path = folder / "script.py"
    path.write_text(text)
    command = CommandLine(module=str(path), arguments=arguments, environ=ENVIRON, cwd=str(folder))
    return forker().call(command, limit_s=200)
