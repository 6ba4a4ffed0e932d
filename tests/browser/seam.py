"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.view.page import page
from numapin.view.picture import COLORS
