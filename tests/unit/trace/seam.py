"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.steps import meter
from numapin.steps.record import StepSettings
from numapin.system import proc
from numapin.trace import hook, script, tracer
from numapin.trace.analysis import Lengths, analyze, common, length, union, without
from numapin.trace.reading import read_trace
from numapin.trace.records import read_noted
from numapin.trace.report import TraceReport, make_report
from numapin.trace.script import CpuUse
from numapin.view.trace_table import trace_table
