"""Files that the user named."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from numapin.base.files import write_text_to
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from pathlib import Path


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """Through a link what it leads to is replaced; a pipe is written to, and one that nobody reads is an error."""
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    link.symlink_to(target)
    write_text_to(str(link), "1", remedy="")
    assert (link.is_symlink(), target.read_text()) == (True, "1")
    os.mkfifo(pipe)
    with pytest.raises(NumapinError, match="pipe cannot be written") as caught:
        write_text_to(str(pipe), "", remedy="use --report")
    assert caught.value.hint == "use --report"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text_to(str(pipe), "2", remedy="")
    assert os.read(reader, 100) == b"2"
    os.close(reader)
    assert pipe.is_fifo()
