"""The only place of these tests that imports numapin's internals which need torch."""

from __future__ import annotations

from numapin.bench.measure import loader
from numapin.bench.measure.loader import _warm_up, _window
from numapin.bench.measure.loader_data import InMemory, collate_of, num_bytes, require_intact, tensors
from numapin.bench.measure.loader_peers import BUILDERS, Setup
