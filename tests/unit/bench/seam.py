"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.bench import harness
from numapin.bench.cases import alloc, overlap
from numapin.bench.cases.loader import CASES, PEAK, PEERS, SAMPLES, LoaderBenchOptions, Work, loader_benchmark, spin
from numapin.bench.cases.overlap import share_within
from numapin.bench.cases.transfer import TransferBenchOptions, transfer_benchmark
from numapin.bench.model import (
    BenchAnswer,
    Benchmark,
    BenchReport,
    BenchVerdict,
    Case,
    Comparison,
    Peer,
    Question,
    Run,
    combine,
    summarize,
)
from numapin.bench.verdict import verdict_of
from numapin.cli.bench import parse_sizes
from numapin.system import memory
from numapin.view.bench_layouts import ALLOC, LOADER
from numapin.view.bench_table import Column, bench_table, head, sweep_table

if TYPE_CHECKING:
    from numapin.bench.cases.loader import LoaderCase
    from numapin.bench.measure.loader_data import Batch
