"""The only place of these tests that imports numapin's internals which need torch."""

from __future__ import annotations

from numapin.data import forking, starting
from numapin.data.opening import device
from numapin.data.slots import quarantine
from numapin.data.slots.handover import HandedDown
from numapin.data.slots.pool import Pool
from numapin.data.slots.quarantine import Quarantine
