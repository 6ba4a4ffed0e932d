"""The only place of these tests that imports numapin's internals which need torch."""

from __future__ import annotations

from numapin.data import forking, opening, quarantine
from numapin.data.handover import HandedDown
from numapin.data.quarantine import Quarantine
