"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.bench import alloc, loader, model, overlap, process, transfer
from numapin.bench.loader import CASES, InMemory, _warm_up, _window, require_intact
from numapin.bench.machine import read_machine
from numapin.bench.model import Benchmark, Case, Peer, Run
from numapin.bench.verdict import verdict_of
from numapin.cli.bench import parse_sizes
from numapin.view.bench_table import bench_table
