"""Pages in a real browser."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM: Final = next((path for path in map(shutil.which, _PROGRAMS) if path), "")
needs_chromium = pytest.mark.skipif(not _CHROMIUM, reason="no chromium on PATH; type: apt-get install chromium")


def document(file: Path, *options: str) -> str:
    """Open a file; return the document that its scripts have made of it."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    common = ("--headless", "--disable-gpu", f"--user-data-dir={file.with_name('profile')}", *sandbox)
    command = [_CHROMIUM, *common, *options, "--dump-dom", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
