"""The hook in each Python below `numapin exec --children`: which imports of torch's modules it finds."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.children.below import table
from tests.unit.children.seam import HOOK

if TYPE_CHECKING:
    from pathlib import Path

CUDA = """
import os
if os.path.exists(os.environ["FAILS"]):
    raise ImportError
def _lazy_init(): pass
def set_device(device): pass
"""
LOOK = "import importlib.util; assert importlib.util.find_spec('torch.cuda').name == 'torch.cuda'"
FAIL = """
open(os.environ["FAILS"], "w").close()
try:
    import torch.cuda
except ImportError:
    os.unlink(os.environ["FAILS"])
"""


@pytest.mark.parametrize("before", ["", LOOK, FAIL, LOOK + FAIL], ids=["nothing", "look", "failed", "both"])
def test_the_import_that_succeeds_is_patched(before: str, tmp_path: Path) -> None:
    """Programs that only look whether there is a module, and imports that fail, leave the hook in place."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "cuda.py").write_text(CUDA)
    environ = {
        **os.environ,
        "NUMAPIN_CHILDREN": table(tmp_path).render(),
        "PYTHONPATH": f"{HOOK}:{tmp_path}",
        "FAILS": str(tmp_path / "fails"),
    }
    program = f"import os\n{before}\nimport torch.cuda\nprint(hasattr(torch.cuda.set_device, '__wrapped__'))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
