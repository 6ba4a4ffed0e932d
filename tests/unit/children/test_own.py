"""What a process below `numapin exec --children` does when it takes a GPU, in a real process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.needs import needs_two_cpus
from tests.unit.children.below import CPUS, run

if TYPE_CHECKING:
    from pathlib import Path


@needs_two_cpus
@pytest.mark.parametrize(("rank", "of_helper"), [("0", 1), ("1", 1)])
def test_a_helper_follows_a_process_whose_local_rank_was_wrong(rank: str, of_helper: int, tmp_path: Path) -> None:
    """A helper inherits LOCAL_RANK; it follows the GPU that its parent took, and only another rank names one."""
    text = """
print(cpus())
torch.cuda.set_device(1)
print(cpus())
subprocess.run(HELPER)
subprocess.run(HELPER, env={**os.environ, "LOCAL_RANK": "2"})
"""
    ran = run(tmp_path, text, LOCAL_RANK=rank)
    assert ran.lines == [f"[{CPUS[number]}]" for number in (int(rank), 1, of_helper, 0)], ran.err
