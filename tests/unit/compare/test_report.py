"""The report of a comparison: figures of a run, variants, the order of the runs, outcomes, tables."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from numapin import Request, discover, make_plan
from numapin.errors import UsageError
from tests.unit.compare.made import SCRIPT, failed, report_of, report_on, run
from tests.unit.compare.seam import (
    DEFAULT,
    KNOWN,
    OTHERS,
    STEP,
    CompareReport,
    Phase,
    RankSteps,
    StepUnit,
    Verdict,
    _Campaign,
    _percent,
    between,
    compare_table,
    default_names,
    duration,
    example_names,
    figures_of,
    known_variant,
    own_command,
    own_variant,
    parse_names,
    turns,
    verdict_lines,
)
from tests.unit.compare.seam import require_different_names as require

if TYPE_CHECKING:
    from collections.abc import Callable

MS = 10**6
FASTER, SAME, UNKNOWN = "numapin", "torchrun-threads", "numapin-loader"


def rank(number: int, *, step_ms: float = 10, **changes: object) -> RankSteps:
    """Return a rank with ten measured steps of 64 samples, a quarter of whose time is waiting."""
    one = RankSteps(
        rank=number,
        local_rank=number,
        num_ranks=2,
        restart=0,
        pid=100 + number,
        phase=Phase.DONE,
        unit=StepUnit.OPTIMIZER_STEP,
        num_seen=20,
        num_skipped=10,
        num_ahead=0,
        first_ns=5000 * MS,
        begin_ns=6000 * MS,
        step_ns=(int(step_ms * MS),) * 10,
        waited_ns=int(2.5 * step_ms * MS),
        num_batches=10,
        num_samples=640,
        gpu_memory_bytes=1 << 30,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def readings(**changes: object) -> dict[str, Any]:
    """Return readings of a job that uses two CPUs all the time."""
    none = {
        "started_s": 2.0,
        "cpu_at": lambda at_s: 2 * at_s,
        "host_cpu_at": lambda _: None,
        "busy": (),
        "memory_bytes": None,
        "peak_bytes": None,
        "remote_share": None,
    }
    return none | changes


def report(**figures: float) -> CompareReport:
    """Return a report with every outcome, and with more figures."""
    shown = {
        "samples_per_s": 3200.0,
        "wait_share": 0.25,
        "startup_s": 4.0,
        "memory_bytes": float(1 << 30),
        "peak_bytes": float(1 << 30),
        **figures,
    }
    return report_of(
        {
            "torchrun": (0.0200, 0.0201, 0.0199, 0.0200, 0.0202, 0.0200, 0.0199),
            SAME: (0.0201, 0.0200, 0.0199, 0.0201, 0.0201, 0.0200, 0.0200),
            FASTER: (0.0100, 0.0101, 0.0100, 0.0099, 0.0100, 0.0101, 0.0100),
            UNKNOWN: (0.0150, 0.0250, 0.0200, 0.0260, 0.0190, 0.0310, 0.0170),
        },
        failed("torchrun-node", "it ended with status 1\n    numactl: not found"),
        **shown,
    )


class TestFigures:
    """The figures of one run."""

    def test_the_slowest_rank_counts(self) -> None:
        """The step time is the slowest rank's, samples are those of all ranks, and the wait is their mean."""
        used = readings(host_cpu_at=lambda at_s: 3 * at_s)
        found = figures_of([rank(0, step_ms=100), rank(1, step_ms=200, waited_ns=0)], **used)
        assert found[STEP] == pytest.approx(0.200)
        assert found["samples_per_s"] == pytest.approx(640 + 320)
        assert found["wait_share"] == pytest.approx(0.125)
        assert found["startup_s"] == pytest.approx(3.0)
        assert found["cpu_s_per_step"] == pytest.approx(0.400)
        assert found["other_cpus"] == pytest.approx(1.0)
        assert found["gpu_memory_bytes"] == 1 << 30

    def test_what_is_unknown_is_left_out(self) -> None:
        """Without a loader of torch, a GPU or readings, only times are there."""
        bare = rank(0, num_batches=0, num_samples=None, gpu_memory_bytes=None)
        found = figures_of([bare], **readings(cpu_at=lambda _: None))
        assert found.keys() == {STEP, "step_median_s", "step_p95_s", "startup_s"}

    @pytest.mark.parametrize(
        ("step_ms", "cpu_at"), [(50, lambda at_s: 2 * at_s), (500, lambda at_s: -at_s), (500, lambda _: None)]
    )
    def test_cpu_time_that_cannot_be_told_is_left_out(
        self, step_ms: float, cpu_at: Callable[[float], float | None]
    ) -> None:
        """Half a second is too short, less CPU time than before means that a process ended, and none is unknown."""
        found = figures_of([rank(0, step_ms=step_ms)], **readings(cpu_at=cpu_at, host_cpu_at=lambda at_s: at_s))
        assert found.keys().isdisjoint({"cpu_s_per_step", "other_cpus"})

    def test_the_mean_counts_not_the_median(self) -> None:
        """A loop that waits in every fourth step is as slow as its mean says."""
        found = figures_of([rank(0, step_ns=(10 * MS, 10 * MS, 10 * MS, 50 * MS))], **readings())
        assert found[STEP] == pytest.approx(0.020)
        assert found["step_median_s"] == pytest.approx(0.010)

    def test_gpus_count_within_the_window_only(self) -> None:
        """Readings before the first and after the last measured step are left out, and so are GPUs that stay idle."""
        busy = [(at_s, {"a": share, "idle": 0.0}) for at_s, share in ((5.9, 0.0), (6.05, 0.8), (6.08, 0.6), (6.2, 0.0))]
        assert figures_of([rank(0)], **readings(busy=busy))["gpu_busy_share"] == pytest.approx(0.7)

    def test_cpu_time_is_read_between_two_readings(self) -> None:
        """CPU time between readings is in proportion; outside of them it is unknown."""
        assert between([(1.0, 10.0), (2.0, 20.0)], 1.5) == 15.0
        assert between([(1.0, 10.0), (2.0, 20.0)], 2.5) is None


class TestVariants:
    """Names and texts as command lines."""

    @pytest.mark.parametrize("name", KNOWN)
    def test_known_variants_run_the_script_on_equal_ranks(self, name: str) -> None:
        """Each known variant starts the same number of ranks of the same script."""
        variant = known_variant(name, SCRIPT)
        assert variant.command[-3:] == SCRIPT.words
        assert variant.command[variant.command.index("--nproc-per-node") + 1] == "2"
        assert shlex.join(variant.shown).endswith("train.py --lr 0.1")

    @pytest.mark.parametrize("name", example_names())
    def test_idle_cpus_that_a_wider_binding_uses(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        """By default --bind socket is compared where the plan warns that it would use idle CPUs, and only there."""
        topology = discover(machine=Path(name), environ={})
        plan = make_plan(topology, Request())
        warns = any("--bind socket uses them" in warning for warning in plan.warnings)
        assert default_names(topology, plan) == (*DEFAULT, *["numapin-socket"] * warns)
        assert ("numapin-socket is compared, too" in capsys.readouterr().err) == warns
        assert warns == (name == "example:dgx-a100")

    def test_threads_are_numapins(self) -> None:
        """One variant is torchrun with the number of threads that numapin gives a rank."""
        assert known_variant("torchrun-threads", SCRIPT).variables == {"OMP_NUM_THREADS": "8"}
        assert "torchrun-threads" in DEFAULT

    def test_own_variants(self) -> None:
        """A text names variables, a launcher and its options; `numapin run` is `numapin`."""
        variant = own_variant("OMP_NUM_THREADS=4 A='b c' numapin run --bind socket", SCRIPT)
        assert variant.variables == {"OMP_NUM_THREADS": "4", "A": "b c"}
        assert variant.shown[2:] == ("numapin", "run", "--nproc-per-node", "2", "--bind", "socket", *SCRIPT.words)
        module = replace(SCRIPT, is_module=True)
        assert own_variant("torchrun", module).shown[-4:] == ("-m", *SCRIPT.words)
        command = own_command("X=1 python 'a b.py'", option="--a")
        assert (command.name, command.command, command.variables) == ("a", ("python", "a b.py"), {"X": "1"})

    @pytest.mark.parametrize("text", ["accelerate launch", "A=1", "", "torchrun 'x"])
    def test_wrong_texts_are_usage_errors(self, text: str) -> None:
        """Another launcher, no launcher, or an open quote is an error that says what to write."""
        with pytest.raises(UsageError) as caught:
            own_variant(text, SCRIPT)
        assert caught.value.hint
        assert ("is not closed" in caught.value.message) == ("'" in text)

    @pytest.mark.parametrize("text", ["x", "", "0", "101", "nan"])
    def test_a_margin_is_a_percentage(self, text: str) -> None:
        """Anything else is an error in words."""
        with pytest.raises(ValueError, match=r"is not (a percentage such as 5 or 5%|between 0 and 100 %)"):
            _percent(text)

    def test_a_comparison_takes_two_different_variants(self) -> None:
        """One variant, or the same one twice, is an error; unknown names are, too."""
        one = known_variant("torchrun", SCRIPT)
        for variants in ([one], [one, one]):
            with pytest.raises(UsageError):
                require(variants)
        for text in ("cd x && python y.py", "cd x; python y.py", "python x.py > log", "python x.py | tee log"):
            with pytest.raises(UsageError, match="no shell runs"):
                own_command(text, option="--a")
        assert own_command("python -c 'import a; a.b()'", option="--a").command[-1] == "import a; a.b()"
        with pytest.raises(ValueError, match="is not one of torchrun"):
            parse_names("torchrun,torchrn")


class TestSchedule:
    """The order of the runs, and the time left."""

    def test_every_other_round_runs_backwards(self) -> None:
        """Each variant runs once a round; a pair of rounds mirrors itself, and not all pairs have the same order."""
        names = ["a", "b", "c", "d"]
        order = list(turns(names, 8))
        assert order == list(turns(names, 8)), "it can be repeated"
        rounds = [[name for number, name in order if number == one] for one in range(8)]
        assert all(sorted(one) == names for one in rounds)
        assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
        assert len({tuple(one) for one in rounds[::2]}) > 1

    def test_the_time_left_is_what_earlier_runs_took(self) -> None:
        """A variant takes as long as before; one without a run, as long as the others."""
        campaign = _Campaign({}, (), print)
        assert campaign.left_s(["a"]) is None
        campaign.durations_s.update(a=[10, 12], b=[30])
        assert campaign.left_s(["a", "b", "c"]) == 11 + 30 + 12
        assert [duration(s) for s in (40, 600, 3900)] == ["40 s", "10 min", "1 h 05 min"]


class TestReport:
    """Outcomes in words and in tables."""

    def test_outcomes(self) -> None:
        """Each variant is faster, no different or unknown, in words that name the baseline and the interval."""
        lines = {variant.name: verdict_lines(variant)[0] for variant in report().variants}
        assert re.match(r"numapin is faster: 2\.00x \[1\.9\d, 2\.0\d\] as fast as torchrun$", lines[FASTER])
        assert re.match(r"torchrun-threads: no difference from torchrun: 1\.00x .* [\d.]+% or more", lines[SAME])
        assert "not enough runs to tell" in lines[UNKNOWN]
        assert lines["torchrun-node"] == "torchrun-node: not measured"

    def test_a_failed_baseline_is_replaced(self) -> None:
        """If the first variant failed, the others are compared with the next one, with a note."""
        made = report_of({"numapin": [0.1] * 5, "numapin-loader": [0.05] * 5}, failed("torchrun", "it broke"))
        assert made.baseline == "numapin"
        ratios = {variant.name: variant.ratio for variant in made.variants}
        assert ratios["numapin-loader"] is not None
        assert ratios["numapin-loader"].verdict is Verdict.FASTER
        assert ratios["torchrun"] is None

        alone = report_of({"numapin": [0.1] * 5}, failed("torchrun", "it broke"))
        assert not any("compared with" in note for note in alone.notes), "nothing is"

    def test_steps_in_words(self) -> None:
        """The line has the numbers of runs and steps, and why more steps were skipped than asked for."""
        made = report_of({"torchrun": [0.1], "numapin": [0.1]})
        assert (
            made.steps_in_words
            == "1 run of each variant, in turn; each measured 40 steps, 4.1 s or more, after the first 0"
        )
        runs = [run(name, i, 0.1) for name in ("torchrun", "numapin") for i in range(2)]
        skipped = report_on([replace(one, result=replace(one.result, num_skipped=16)) for one in runs]).steps_in_words
        assert skipped.startswith("2 runs of each variant")
        assert skipped.endswith("the first 16 (more than --skip 10: a loader had fetched their batches ahead)")

    def test_a_slow_first_run_is_noted(self) -> None:
        """If all runs measured few steps in little time, a note names the options; not if a script ended early."""
        runs = [run(name, i, 0.001) for name in ("torchrun", "numapin") for i in range(5)]
        (note,) = report_on(runs).notes
        assert "only 40 of 100 steps, in 0.041 s or less of --seconds 10" in note
        assert "larger --seconds or --skip" in note
        ended = [replace(one, result=replace(one.result, notes=("the script ended after 50 steps",))) for one in runs]
        assert report_on(ended).notes == ()

    def test_the_legend_has_the_columns_that_are_shown(self) -> None:
        """Columns of other programs and of remote memory are explained if there are such columns."""
        for figures in ({}, {"other_cpus": 1.0}, {"remote_share": 0.1}):
            console = Console(width=200, record=True, file=StringIO())
            console.print(compare_table(report(**figures)))
            text = console.export_text()
            assert ("others: CPUs" in text) == ("other_cpus" in figures)
            assert ("remote: memory" in text) == ("remote_share" in figures)
            assert "waits: share" in text

    def test_uneven_steps_and_unequal_work_are_noted(self) -> None:
        """A mean far above the median, and variants with other steps, are said."""
        made = report_of({"torchrun": [0.1] * 3, "numapin": [0.1] * 3}, step_median_s=0.02)
        assert "steps are uneven in torchrun, numapin" in made.notes[0]

    def test_unlike_variants_are_said(self) -> None:
        """Variants with other numbers of samples per step are noted; with another kind of step they have no ratio."""
        runs = [run("torchrun", i, 0.1, samples_per_s=320.0) for i in range(5)]
        more = [run("numapin", i, 0.1, samples_per_s=640.0) for i in range(5)]
        assert any(
            "samples per step differ (torchrun: 32, numapin: 64)" in note for note in report_on(runs + more).notes
        )
        other = [replace(one, result=replace(one.result, unit="batch")) for one in more]
        made = report_on(runs + other)
        assert made.variants[1].ratio is None
        assert "their steps differ (torchrun: optimizer step, numapin: batch)" in made.notes[0]

    def test_fetched_ahead_batches_and_other_programs_are_noted(self) -> None:
        """A note says how slow a loader may be unseen, and how much of the CPUs was used by others."""
        runs = [run(name, i, 0.1, other_cpus=4.0) for name in ("torchrun", "numapin") for i in range(5)]
        ahead = [replace(one, result=replace(one.result, num_ahead=32)) for one in runs]
        notes = " ".join(report_on(ahead).notes)
        assert "numapin fetches 32 batches ahead" in notes
        assert "up to 80% too slow" in notes
        assert "other programs used up to 4.0 of 16 CPUs" in notes

    def test_numapin_is_compared_at_equal_numbers_of_threads(self) -> None:
        """numapin, twice as fast as torchrun with one thread, is no different from torchrun with as many."""
        quick = (0.0100, 0.0101, 0.0100, 0.0099, 0.0100, 0.0101)
        made = report_of({"torchrun": [2 * step for step in quick], "torchrun-threads": quick, "numapin": quick[::-1]})
        first, second = verdict_lines(made.variants[2])
        assert first.startswith("numapin is faster: 2.00x")
        assert second.startswith("numapin: no difference from torchrun-threads")
        assert made.variants[1].ratio_to_threads is None

    def test_no_secret_is_in_a_report(self) -> None:
        """Tokens in the script's arguments, in variables and in a variant's own text are nowhere in a report."""
        secret = replace(SCRIPT, words=("train.py", "--api-key", "sesame1"))
        variants = [
            known_variant("torchrun", secret),
            own_variant("HF_TOKEN=sesame2 numapin", secret),
            own_command("WANDB_API_KEY=sesame3 python x.py --password sesame4", option="--a"),
        ]
        runs = [run(variant.name, i, 0.1) for variant in variants for i in range(3)]
        made = report_on(runs, variants)
        console = Console(width=200, record=True, file=StringIO())
        console.print(compare_table(made))
        for text in (json.dumps(made.to_json()), console.export_text()):
            assert "sesame" not in text
            assert "***" in text

    @pytest.mark.parametrize("figures", [{}, dict.fromkeys(OTHERS, 12345678.9)], ids=["some", "all"])
    def test_the_table_fits_80_columns(self, figures: dict[str, float]) -> None:
        """No line of the tables is longer than a terminal, and each outcome and failure is there."""
        console = Console(width=80, record=True, file=StringIO())
        console.print(compare_table(report(**figures)))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= 80
        words = " ".join(text.split())
        for expected in (
            "numapin is faster",
            "no difference",
            "not enough runs to tell",
            "numactl: not found",
            "99 % interval" if figures else "3,200",
        ):
            assert expected in words
