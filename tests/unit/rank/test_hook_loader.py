"""The hook in a rank's interpreter: which imports of torch's modules it finds. torch is a stand-in of empty modules."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.rank.seam import hook_env

if TYPE_CHECKING:
    from pathlib import Path

LOADER = "torch.utils.data.dataloader"
LOOK = f"import importlib.util; assert importlib.util.find_spec({LOADER!r}).name == {LOADER!r}"
FAIL = f"""
open(sys.argv[1], "w").close()
try:
    import {LOADER}
except ImportError:
    os.unlink(sys.argv[1])
"""
IMPORT = f"import {LOADER} as loader; print(loader.has_run)"
FOUND = "this torch has no DataLoader._get_iterator"


def _run(folder: Path, *steps: str) -> tuple[str, str]:
    """Run a program beside a stand-in for torch, with the hook; return what it wrote to stdout and stderr."""
    package = folder
    for name in LOADER.split(".")[:-1]:
        package /= name
        package.mkdir()
        (package / "__init__.py").touch()
    fails = folder / "fails"
    text = f"import os\nif os.path.exists({str(fails)!r}): raise ImportError\nhas_run = 'it has run'\n"
    (package / "dataloader.py").write_text(text)
    own = {name: value for name, value in os.environ.items() if not name.startswith("NUMAPIN_")}
    environ = hook_env.environment("numapin", {**own, "PYTHONPATH": str(folder)})
    program = "\n".join(("import os, sys", *steps, "print([each.__name__ for each in sys.meta_path[:1]])"))
    command = [sys.executable, "-c", program, str(fails)]
    done = subprocess.run(command, env={**own, **environ}, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "before",
    [(), (LOOK,), (LOOK, LOOK), (FAIL,), (LOOK, FAIL)],
    ids=["nothing", "look", "looks", "failed", "both"],
)
def test_the_import_that_succeeds_is_found(before: tuple[str, ...], tmp_path: Path) -> None:
    """Programs that only look whether there is a module, and imports that fail, leave the hook in place."""
    out, err = _run(tmp_path, *before, IMPORT)
    assert err.count(FOUND) == 1, err
    assert out.startswith("it has run\n")
    assert "TorchWatch" in out  # StatefulDataLoader has not been imported


def test_a_look_alone_changes_nothing(tmp_path: Path) -> None:
    """The hook calls nothing until the module has been run."""
    assert FOUND not in _run(tmp_path, LOOK)[1]
