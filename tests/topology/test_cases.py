"""Every case of cases_*.py has the recorded effect on its machine: tests/topology/recorded/*.json.

NUMAPIN_UPDATE_GOLDEN=1 records the effects again, so that a change is a diff to review. The sentence that names a case
says what its effect must be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.topology import cases_documents, cases_gpus, cases_kernel, cases_vendors, cases_visible
from tests.topology.reading import Case, facts

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORDED: Final = Path(__file__).parent / "recorded"
TABLES: Final[dict[str, Mapping[str, Case]]] = {
    "kernel": cases_kernel.CASES,
    "gpus": cases_gpus.CASES,
    "vendors": cases_vendors.CASES,
    "documents": cases_documents.CASES,
    "visible": cases_visible.CASES,
}


@pytest.mark.parametrize(("table", "sentence"), [(table, name) for table, cases in TABLES.items() for name in cases])
def test_a_detail_has_its_recorded_effect(table: str, sentence: str, tmp_path: Path) -> None:
    """The topology differs from that of the base machine in exactly the recorded facts."""
    found = facts(TABLES[table][sentence], tmp_path / "root")
    file = RECORDED / f"{table}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        recorded = {name: recorded.get(name) for name in TABLES[table]} | {sentence: found}
        file.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    assert found == recorded.get(sentence)


@pytest.mark.parametrize("table", TABLES)
def test_every_record_has_its_case(table: str) -> None:
    """No recorded effect is left behind by a case that was renamed."""
    assert list(json.loads((RECORDED / f"{table}.json").read_text())) == list(TABLES[table])
