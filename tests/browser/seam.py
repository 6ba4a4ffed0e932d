"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.view.picture.page import page
from numapin.view.picture.style import COLORS, RANK_COLORS
