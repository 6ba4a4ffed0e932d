"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.steps import totals
from numapin.steps.totals import Totals, Waited, find_waited, read_waited, totals_of
