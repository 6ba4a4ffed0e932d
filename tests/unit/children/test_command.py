"""What the command of `numapin exec --children` gets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from numapin.children import command
from numapin.rank.become import BINDING, CHILDREN
from numapin.rank.roles import HOOK, ROLES
from tests.unit.children.below import table

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing_of_an_outer_run_is_left(tmp_path: Path) -> None:
    """The binding, the roles and the hook of the rank that it runs in do not hold for processes with another GPU."""
    path = os.pathsep.join((HOOK, "/own"))
    outer = {BINDING: "{}", ROLES: "main=0 loader=1", "PYTHONPATH": path, "NAME": "value"}
    given = command._environment(table(tmp_path), outer)
    assert given.keys() == {"NAME", CHILDREN, "PYTHONPATH"}
    assert given["PYTHONPATH"] == os.pathsep.join((command._FOLDER, "/own"))
    assert ROLES in outer
