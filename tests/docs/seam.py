"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.bench.machine import BenchMachine
from numapin.bench.model import BenchAnswer, Benchmark, BenchReport, BenchVerdict, Case, Peer, Run, summarize
from numapin.cli import run, trace
from numapin.cli.main import numapin
from numapin.cli.run import outcome_of
from numapin.data.stats import Stats
from numapin.launcher import options
from numapin.launcher.failure import JobFailure, RanksFailed
from numapin.observe.model import NcclLibrary
from numapin.observe.node import JobOrigin
from numapin.rank.bind import Applied
from numapin.topology.model import NodeSource
from numapin.topology.vendors import GpuVendor
from numapin.trace.analysis import analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import make_report
from numapin.view.openmetrics import openmetrics
