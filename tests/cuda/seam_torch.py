"""The only place of these tests that imports numapin's internals which need torch."""

from __future__ import annotations

from numapin.data import opening
from numapin.data.quarantine import capture_lock, is_capturing, watch_captures
