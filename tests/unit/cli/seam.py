"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.formats import left_in_words
from numapin.cli.completion import Candidates, _bash_lines, _lines, complete, split_line
from numapin.cli.early_end import EarlyEnd
from numapin.cli.main import numapin
from numapin.cli.output import show_status
from numapin.trace.reading import read_report
