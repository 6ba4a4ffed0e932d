"""Student's t distribution, held against printed tables."""

from __future__ import annotations

import pytest

from tests.unit.compare.seam import student_t


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 10, 2.228),
        (0.95, 40, 2.021),
        (0.99, 1, 63.657),
        (0.99, 2, 9.925),
        (0.99, 3, 5.841),
        (0.99, 4, 4.604),
        (0.99, 7, 3.499),
        (0.99, 49, 2.680),
    ],
)
def test_quantiles(confidence: float, freedom: int, quantile: float) -> None:
    """The two-sided quantiles are those of a table: exact for one and two degrees of freedom, else at most 1 % less."""
    found = student_t(confidence, freedom)
    assert found <= quantile * 1.0005
    assert found == pytest.approx(quantile, rel=0.0005 if freedom < 3 else 0.01)
