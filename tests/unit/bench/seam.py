"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.bench import alloc, loader, overlap, process
from numapin.bench.loader import CASES, InMemory, _warm_up, _window, loader_benchmark, require_intact
from numapin.bench.model import (
    BenchAnswer,
    Benchmark,
    BenchReport,
    BenchVerdict,
    Case,
    Column,
    Comparison,
    Peer,
    Question,
    Run,
    summarize,
)
from numapin.bench.overlap import share_within, spin
from numapin.bench.transfer import transfer_benchmark
from numapin.bench.verdict import verdict_of
from numapin.cli.bench import parse_sizes
from numapin.view.bench_table import bench_table

if TYPE_CHECKING:
    from numapin.bench.loader import LoaderCase
