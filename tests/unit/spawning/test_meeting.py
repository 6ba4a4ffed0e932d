"""The store that is given our socket, with a small module in place of torch's."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.spawning.seam import meeting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STORE = """
class TCPStore:
    def __init__(self, host_name, port, world_size=None, is_master=False, master_listen_fd=None):
        self.given = master_listen_fd
"""


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give a held port, on which `store_of_test` is to serve once it is imported."""
    (tmp_path / "store_of_test.py").write_text(STORE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(meeting, "_MODULE", "store_of_test")
    monkeypatch.delitem(sys.modules, "store_of_test", raising=False)
    with meeting.reserved_port() as port:
        descriptor = os.dup(port.fileno())
        meeting.serve_on(descriptor)
        yield meeting.port_of(port)
        os.close(descriptor)


@pytest.mark.parametrize("asked_before", [0, 2])
def test_asked_for_and_imported(held: int, asked_before: int) -> None:
    """The store is patched once, also if programs asked before whether there is such a module."""
    watches = len(sys.meta_path)
    for _ in range(asked_before):
        assert importlib.util.find_spec("store_of_test") is not None
    store = importlib.import_module("store_of_test").TCPStore
    assert len(sys.meta_path) == watches - 1
    assert store.__init__.__wrapped__.__qualname__ == "TCPStore.__init__"
    mine = store("127.0.0.1", held, 2, True).given
    os.close(mine)
    assert store("127.0.0.1", held, 2, False).given is None
    assert store("127.0.0.1", held + 1, 2, True).given is None
