"""torch's GPUs, as the process that is asked for them reads them from packages that stand in for torch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import call

if TYPE_CHECKING:
    from pathlib import Path

ONE_GPU = """
class version: cuda = "13.0"
class cuda:
    device_count = lambda: 1
    get_device_name = "GPU {}".format
"""
FOUND: dict[str, object] = {"cuda": "13.0", "gpus": ["GPU 0"], "no_gpu": None}
NONE: dict[str, object] = {"cuda": None, "gpus": [], "no_gpu": "torch is built without CUDA"}


@pytest.mark.parametrize(
    ("version", "torch", "seen"),
    [
        ("cuda = hip = None", "raise SystemExit('imported')", NONE),
        ("cuda, hip = '13.0', None", ONE_GPU, FOUND),
        ("cuda, hip = None, '7.0'", ONE_GPU, FOUND),  # ROCm's GPUs are torch.cuda's, too
        ("cuda = None", ONE_GPU, FOUND),
        (None, ONE_GPU, FOUND),
    ],
)
def test_only_a_torch_for_gpus_is_imported(
    tmp_path: Path, version: str | None, torch: str, seen: dict[str, object]
) -> None:
    """Torch is not imported if its version file names neither CUDA nor ROCm; otherwise it is asked for its GPUs."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text(torch)
    if version is not None:
        (folder / "version.py").write_text(version)
    done = call(sys.executable, "-m", "numapin.bench.machine", PYTHONPATH=str(tmp_path))
    assert done.status == 0, done.err
    assert json.loads(done.out) == seen
