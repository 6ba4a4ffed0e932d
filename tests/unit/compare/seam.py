"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.stats import Faster, Verdict, faster, student_t
from numapin.cli.compare import _percent, default_names
from numapin.compare import campaign
from numapin.compare.campaign import ComparedRun, JobOptions, JobResult, measure_all, turns, with_equal_steps
from numapin.compare.report import Arm, CompareReport, StepRatio, compare_arms, figures_of, make_report
from numapin.compare.variants import (
    DEFAULT,
    KNOWN,
    Script,
    Variant,
    known_variant,
    own_command,
    own_variant,
    parse_names,
    require_different_names,
)
from numapin.steps.job import between
from numapin.steps.meter import Place, StepMeter, StepWindow, claim_file
from numapin.steps.record import Phase, RankSteps, StepSettings, StepUnit
from numapin.topology.discover import example_names
from numapin.view.compare_table import OTHERS, compare_table
