"""`bench offload`: its cases, the start of its jobs, and its verdict."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from numapin.bench.cases import offload
from numapin.bench.measure.offload import _last_error, _start, _times_asked
from numapin.bench.model import BenchReport, CaseResult, PeerResult, Spread
from numapin.bench.offload_verdict import offload_lines, offload_verdict
from numapin.bench.verdict import FEWEST_REPEATS
from numapin.cli.bench_offload import offload as offload_command
from numapin.view.bench_layouts import OFFLOAD
from numapin.view.bench_table import bench_table

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS: dict[str, Any] = {
    "cases": tuple(offload.CASES),
    "peers": tuple(offload.PEERS),
    "num_ranks": 2,
    "num_workers": 4,
    "seconds": 0.5,
    "size": offload.ON_GPUS,
    "on_gpu": True,
    "num_threads": 16,
}


def _options(**changes: Any) -> offload.OffloadBenchOptions:
    return offload.OffloadBenchOptions(**{**OPTIONS, **changes})


class TestCases:
    """The benchmark as data."""

    def test_each_case_has_each_peer(self, tmp_path: Path) -> None:
        """Every peer starts the same job, and names the case that is asked for."""
        benchmark = offload.offload_benchmark(_options(), folder=str(tmp_path))
        assert benchmark.shares_starts
        assert [case.name for case in benchmark.cases] == ["adamw", "adamw-loader", "fsdp", "fsdp-loader"]
        for case in benchmark.cases:
            assert [peer.name for peer in case.peers] == [*offload.PEERS]
            specs = [peer.specs[0] for peer in case.peers]
            assert {spec["case"] for spec in specs} == {case.name}
            assert all(spec["job"] == specs[0]["job"] for spec in specs)
        json.dumps(specs)

    def test_threads_are_equal_where_they_are_to_be(self, tmp_path: Path) -> None:
        """Arms of torchrun have its default, and numapin's number for a node; numapin's set nothing."""
        (case, *_) = offload.offload_benchmark(_options(), folder=str(tmp_path)).cases
        variables = {peer.name: peer.specs[0]["variables"] for peer in case.peers}
        assert variables == {
            "torchrun": {},
            "torchrun-threads": {"OMP_NUM_THREADS": "16"},
            "node": {},
            "exclusive": {},
        }
        commands: dict[str, Any] = {peer.name: peer.specs[0]["command"] for peer in case.peers}
        assert "torch.distributed.run" in str(commands["torchrun"])
        assert commands["exclusive"][-2:] == ["--bind", "exclusive"]
        assert all("--nproc-per-node', '2'" in str(command) for command in commands.values())

    def test_cases_in_words(self) -> None:
        """Each case says what runs, how large it is, and beside what."""
        texts = [offload.about(case, _options()) for case in offload.CASES]
        assert texts[0] == "fused AdamW on the CPU, 33.6 M parameters a rank, 2 ranks"
        assert texts[1] == f"{texts[0]}, beside 4 busy workers a rank"
        assert texts[2] == "FSDP2 offloaded to the CPU, 134.2 M parameters in all, 2 ranks"
        assert "all on the CPU" in offload.about("fsdp", _options(on_gpu=False))


class TestJobs:
    """The process that starts a launcher."""

    def _spec(self, code: str) -> dict[str, Any]:
        return {
            "peer": "node",
            "case": "adamw",
            "command": [sys.executable, "-c", code],
            "variables": {"A": "1"},
            "job": {},
        }

    def test_a_job_that_answers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The job gets the script and a file with its settings; variables of this process for threads are gone."""
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        code = (
            "import json, os, sys; job = json.load(open(sys.argv[2])); "
            "found = [sys.argv[1].endswith('offload_rank.py'), os.environ.get('OMP_NUM_THREADS'), os.environ['A']]; "
            "json.dump(found, open(job['answer'], 'w'))"
        )
        answer = tmp_path / "node-0.json"
        _start(self._spec(code), answer)
        assert json.loads(answer.read_text()) == [True, None, "1"]

    def test_a_job_that_fails(self, tmp_path: Path) -> None:
        """Its error is kept for all cases of the repeat."""
        answer = tmp_path / "node-0.json"
        _start(self._spec("raise RuntimeError('no memory')"), answer)
        assert json.loads(answer.read_text()) == {"failed": "node exited with status 1: RuntimeError: no memory"}

    def test_repeats_are_counted_by_case_and_peer(self, tmp_path: Path) -> None:
        """The first time that a case and a peer are asked for is repeat 0, also in another process."""
        asked = [("adamw", "node"), ("adamw", "exclusive"), ("adamw", "node"), ("fsdp", "node"), ("adamw", "node")]
        assert [_times_asked(tmp_path, *each) for each in asked] == [0, 0, 1, 0, 2]

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("", "nothing on stderr"),
            ("a\nb\n", "b"),
            ("Traceback:\nValueError: x\nlast", "ValueError: x"),
            ("[rank0]: Traceback:\n[rank0]: ValueError: x\nnumapin: error: it failed", "ValueError: x"),
            ("numapin: error: too few\n  hint: less", "numapin: error: too few"),
        ],
    )
    def test_the_line_that_says_most(self, text: str, line: str) -> None:
        """An exception or numapin's error comes before the last line."""
        assert _last_error(text) == line


def _case(name: str = "fsdp", **speeds: tuple[float, ...]) -> CaseResult:
    """Return a case; steps per second of each repeat by peer, "_" for "-"."""
    peers = tuple(
        PeerResult(
            name=peer.replace("_", "-"),
            num_runs=len(values),
            figures={"steps_per_s": Spread.of(values)} if values else {},
            details=(),
            skipped=None,
        )
        for peer, values in speeds.items()
    )
    return CaseResult(name=name, about="", peers=peers, skipped=None)


DEFAULT, EQUAL = (1.0, 1.02, 0.98, 1.0), (1.98, 2.0, 2.02, 2.0)
NOISY = (5.0, 10.0, 16.0, 9.0)


def _verdict(*cases: CaseResult) -> tuple[str, str]:
    """Return the answer, and the text after the subject."""
    found = offload_verdict(cases)
    return found.answer, found.text.partition(": ")[2]


class TestVerdict:
    """The line of each case, and the verdict."""

    def test_equal_threads_are_as_good(self) -> None:
        """Where repeats are alike there is no difference, and the gain from threads alone is reported."""
        case = _case(torchrun=DEFAULT, torchrun_threads=EQUAL, node=(2.0, 2.01, 2.04, 2.03))
        assert offload_lines([case]) == [
            "fsdp: against torchrun-threads (itself 2.00x (faster): torchrun): node no difference"
        ]
        assert _verdict(case) == (
            "no difference",
            "no difference; threads alone (OMP_NUM_THREADS) make torchrun 2.00x as fast",
        )

    def test_a_gain_is_against_the_best_torchrun(self) -> None:
        """Only a peer that is faster than every torchrun counts, and only in the cases where it is."""
        cases = [
            _case("adamw", torchrun=DEFAULT, torchrun_threads=EQUAL, node=EQUAL, exclusive=(1.5, 1.5, 1.5, 1.5)),
            _case("fsdp-loader", torchrun=DEFAULT, torchrun_threads=EQUAL, node=EQUAL, exclusive=(3.0, 3.1, 2.9, 3.0)),
        ]
        assert offload_lines(cases)[0].endswith("node no difference, exclusive 0.75x (slower)")
        exclusive = [replace(case, peers=tuple(peer for peer in case.peers if peer.name != "node")) for case in cases]
        found = offload_verdict(exclusive)
        assert found.answer == "depends"
        assert found.text.startswith(
            "numapin (exclusive) instead of the best of 2 torchruns: depends, steps are 1.50x faster in fsdp-loader; "
            "steps are 1.33x slower in adamw; threads alone"
        )

    def test_the_verdict_is_about_one_peer(self) -> None:
        """It is fixed before the measurement, so that luck does not choose it."""
        case = _case(torchrun=EQUAL, node=EQUAL, exclusive=(3.0, 3.1, 2.9, 3.0))
        assert offload_verdict([case]).text == "numapin (node) instead of torchrun: no difference"

    def test_a_loss_in_one_case(self) -> None:
        """A case with enough repeats has its verdict, whatever the others lack."""
        short = _case("fsdp-loader", torchrun=(1.0, 1.0), exclusive=(1.0, 1.1))
        lost = _case("adamw-loader", torchrun=EQUAL, exclusive=(1.5, 1.5, 1.5, 1.5))
        assert offload_verdict([lost, short]).text == (
            "numapin (exclusive) instead of torchrun: no, steps are 1.33x slower in adamw-loader; "
            "cannot tell in fsdp-loader: 2 repeats are too few, a verdict needs 4 (--repeats)"
        )

    def test_a_loss(self) -> None:
        """A numapin that is slower everywhere is reported as slower; gains elsewhere make it depend on the case."""
        slower = _case("adamw", torchrun=(10.0, 10.1, 10.2, 10.0), node=(5.0, 5.1, 5.2, 5.0))
        faster = _case("fsdp", torchrun=DEFAULT, node=EQUAL)
        assert offload_lines([slower]) == ["adamw: against torchrun: node 0.50x (slower)"]
        assert _verdict(slower) == ("no", "no, steps are 1.99x slower")
        assert _verdict(slower, faster) == (
            "depends",
            "depends, steps are 2.0x faster in fsdp; steps are 1.99x slower in adamw",
        )

    @pytest.mark.parametrize(
        ("own", "words"),
        [
            ((2.07, 2.1, 2.1, 2.2), "1.05x (faster)"),
            ((2.05, 2.1, 2.1, 2.2), "1.05x"),
            ((2.0, 2.0, 2.01, 2.02), "no difference"),
            ((1.0, 1.2, 1.2, 1.8), "0.60x (slower)"),
        ],
    )
    def test_ranges_must_be_apart(self, own: tuple[float, ...], words: str) -> None:
        """Ranges that are less than 2 % apart are a ratio without a judgement, unless all repeats are alike."""
        assert offload_lines([_case(torchrun_threads=EQUAL, node=own)])[0].endswith(f": node {words}")

    def test_noise_tells_nothing(self) -> None:
        """Wide ranges that overlap leave it open; they are not called equal."""
        case = _case(torchrun=NOISY, node=(4.0, 13.0, 20.0, 11.0))
        assert _verdict(case) == ("cannot tell", "cannot tell: the ranges of the repeats overlap")

    def test_few_repeats_tell_nothing(self) -> None:
        """With fewer than four repeats there are ratios, but no verdict."""
        case = _case(torchrun=(1.0, 1.0, 1.0), node=(9.0, 9.0, 9.0))
        assert offload_lines([case]) == ["fsdp: against torchrun: node 9.00x"]
        assert _verdict(case)[1] == "cannot tell: 3 repeats are too few, a verdict needs 4 (--repeats)"

    def test_one_side_only(self) -> None:
        """Without a torchrun, or without numapin, there is no comparison."""
        cases = [_case(node=EQUAL, exclusive=EQUAL), _case(torchrun=EQUAL, node=())]
        assert offload_lines(cases) == []
        assert _verdict(*cases) == (
            "cannot tell",
            "cannot tell: they were not both measured in any case",
        )

    def test_the_table_has_the_lines_and_the_verdict(self) -> None:
        """Partial reports have them, too."""
        case = _case(torchrun=DEFAULT, node=EQUAL)
        report = BenchReport(
            benchmark="offload",
            command=(),
            machine={},
            settings={},
            cases=(case,),
            is_complete=False,
            verdict=offload_verdict([case]),
        )
        console = Console(width=200, file=io.StringIO(), record=True)
        console.print(bench_table(report, OFFLOAD))
        lines = [line.rstrip() for line in console.export_text().splitlines() if line.strip()]
        assert lines[1] == "median [lowest, highest] over starts"  # nothing on columns that are not there
        assert lines[-2:] == [
            "fsdp: against torchrun: node 2.00x (faster)",
            "numapin (node) instead of torchrun: yes, steps are 2.0x faster",
        ]

    def test_enough_repeats_by_default(self) -> None:
        """The command measures as often as a verdict needs."""
        (repeats,) = (option.default for option in offload_command.params if option.name == "repeats")
        assert repeats == FEWEST_REPEATS
