"""The only place of these tests that imports numapin's internals which need torch."""

from __future__ import annotations

from numapin.data.opening import device
from numapin.data.opening.capture import no_capture, watch_captures
