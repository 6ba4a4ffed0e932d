"""Open a picture in the browser."""

from __future__ import annotations

import sys
from pathlib import Path

from numapin.cli.output import emit, write
from numapin.errors import NumapinError


def open_in_browser(text: str, path: Path | None, *, suffix: str) -> None:
    """Write the file and open it in the user's browser.

    Without a path it goes into a new private folder for temporary files, and stays there, because the browser reads it
    after this process has ended. Raises NumapinError that names the file if there is no browser.
    """
    import webbrowser

    file = (_private_folder() / f"topo.{suffix}" if path is None else path).absolute()
    write(text, file, option="--output")
    emit(f"{file}\n", encoding=sys.getfilesystemencoding())
    if not webbrowser.open(file.as_uri()):
        raise NumapinError(f"there is no browser to open {file}", "open the file yourself, or name one in BROWSER")


def _private_folder() -> Path:
    from tempfile import mkdtemp

    return Path(mkdtemp(prefix="numapin-topo-"))
