"""Every case of cases_*.py has the recorded effect on its machine: tests/topology/recorded/*.json.

NUMAPIN_UPDATE_GOLDEN=1 records the effects again, so that a change is a diff to review. The sentence that names a case
says what its effect must be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.recorded.screens import compare
from tests.topology import cases_documents, cases_gpus, cases_kernel, cases_vendors, cases_visible
from tests.topology.reading import Case, facts

RECORDED: Final = Path(__file__).parent / "recorded"
TABLES: Final[dict[str, Mapping[str, Case]]] = {
    "kernel": cases_kernel.CASES,
    "gpus": cases_gpus.CASES,
    "vendors": cases_vendors.CASES,
    "documents": cases_documents.CASES,
    "visible": cases_visible.CASES,
}


@pytest.mark.parametrize("table", TABLES)
def test_each_detail_has_its_recorded_effect(table: str, tmp_path: Path) -> None:
    """The topology differs from that of the base machine in exactly the recorded facts."""
    found = {sentence: facts(case, tmp_path / str(n)) for n, (sentence, case) in enumerate(TABLES[table].items())}
    compare(json.dumps(found, indent=1, ensure_ascii=False) + "\n", str(RECORDED / f"{table}.json"))
