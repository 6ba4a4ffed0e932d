"""The only place of these tests that imports numapin's internals which need torch."""

from __future__ import annotations

from numapin.data.queues import Channel, _frames
