"""`bench offload`: its cases, the start of its jobs, and its verdict."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from numapin.bench.cases import offload
from numapin.bench.measure.offload import _last_error, _start, _times_asked
from numapin.bench.model import CaseResult, PeerResult, Spread
from numapin.bench.offload_verdict import offload_verdict
from numapin.plan.request import CoresFor

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
    "cores_for": CoresFor(loader=4, optimizer=10),
    "num_role_threads": 11,
}


def _options(**changes: Any) -> offload.OffloadBenchOptions:
    return offload.OffloadBenchOptions(**{**OPTIONS, **changes})


class TestCases:
    """The benchmark as data."""

    def test_each_case_has_each_peer(self, tmp_path: Path) -> None:
        """Every peer starts the same job, and names the case that is asked for."""
        benchmark = offload.offload_benchmark(_options(), folder=str(tmp_path))
        assert [case.name for case in benchmark.cases] == ["adamw", "adamw-loader", "fsdp", "fsdp-loader"]
        for case in benchmark.cases:
            assert [peer.name for peer in case.peers] == [*offload.PEERS]
            specs = [peer.specs[0] for peer in case.peers]
            assert {spec["case"] for spec in specs} == {case.name}
            assert all(spec["job"] == specs[0]["job"] for spec in specs)
        json.dumps(specs)

    def test_threads_are_equal_where_they_are_to_be(self, tmp_path: Path) -> None:
        """Arms of torchrun have its default, numapin's number for a node, and that of roles; numapin's set nothing."""
        (case, *_) = offload.offload_benchmark(_options(), folder=str(tmp_path)).cases
        variables = {peer.name: peer.specs[0]["variables"] for peer in case.peers}
        assert variables == {
            "torchrun": {},
            "torchrun-threads": {"OMP_NUM_THREADS": "16"},
            "torchrun-fewer": {"OMP_NUM_THREADS": "11"},
            "node": {},
            "exclusive": {},
            "roles": {},
        }
        commands: dict[str, Any] = {peer.name: peer.specs[0]["command"] for peer in case.peers}
        assert "torch.distributed.run" in str(commands["torchrun"])
        assert commands["roles"][-4:] == ["--bind", "exclusive", "--cores-for", "loader=4,optimizer=10"]
        assert all("--nproc-per-node', '2'" in str(command) for command in commands.values())

    def test_without_cores_for_roles(self, tmp_path: Path) -> None:
        """Where ranks have one core, the arms of roles are left out."""
        (case, *_) = offload.offload_benchmark(_options(cores_for=None), folder=str(tmp_path)).cases
        assert [peer.name for peer in case.peers] == ["torchrun", "torchrun-threads", "node", "exclusive"]

    @pytest.mark.parametrize(
        ("num_cores", "loader", "optimizer"),
        [(2, 1, 0), (3, 1, 1), (4, 1, 2), (8, 2, 5), (16, 4, 10), (72, 18, 45)],
    )
    def test_default_roles(self, num_cores: int, loader: int, optimizer: int) -> None:
        """A quarter for the loader, an eighth for the main thread, the rest for the optimizer."""
        assert offload.default_cores(num_cores) == (loader, optimizer)

    def test_no_default_roles_for_one_core(self) -> None:
        """One core cannot be shared out."""
        assert offload.default_cores(1) is None

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
        asked = [("adamw", "node"), ("adamw", "roles"), ("adamw", "node"), ("fsdp", "node"), ("adamw", "node")]
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


DEFAULT, EQUAL = (1.0, 1.1, 0.9), (1.9, 2.0, 2.1)


class TestVerdict:
    """The last lines."""

    def test_equal_threads_are_as_good(self) -> None:
        """Where ranges overlap there is no difference, and what threads alone give is said."""
        lines = offload_verdict([_case(torchrun=DEFAULT, torchrun_threads=EQUAL, node=(2.0, 2.05, 2.15))])
        assert lines == [
            "fsdp: against torchrun-threads (itself 2.00x (faster): torchrun): node no difference",
            "verdict: no difference between numapin and the best torchrun in any case; threads alone "
            "(OMP_NUM_THREADS) make torchrun 2.00x as fast",
        ]

    def test_a_gain_is_against_the_best_torchrun(self) -> None:
        """Only a way that is faster than every torchrun counts, and only in the cases where it is."""
        lines = offload_verdict(
            [
                _case("adamw", torchrun=DEFAULT, torchrun_threads=EQUAL, node=EQUAL, roles=(1.5, 1.5, 1.5)),
                _case("fsdp-loader", torchrun=DEFAULT, torchrun_threads=EQUAL, node=EQUAL, roles=(3.0, 3.1, 2.9)),
            ]
        )
        assert lines[0].endswith("node no difference, roles 0.75x (slower)")
        assert lines[2].startswith(
            "verdict: numapin is faster than the best torchrun: fsdp-loader 1.50x (roles); threads"
        )

    @pytest.mark.parametrize(
        ("own", "relation"),
        [((2.15, 2.2, 2.3), "(faster)"), ((2.14, 2.2, 2.3), "no difference"), ((1.0, 1.2, 1.86), "(slower)")],
    )
    def test_ranges_must_be_apart(self, own: tuple[float, ...], relation: str) -> None:
        """Ranges that are less than 2 % apart are no difference."""
        (line, _) = offload_verdict([_case(torchrun_threads=EQUAL, node=own)])
        assert line.endswith(relation)

    def test_few_repeats_tell_nothing(self) -> None:
        """With fewer than three repeats there are ratios, but no verdict."""
        lines = offload_verdict([_case(torchrun=(1.0, 1.0), node=(9.0, 9.0))])
        assert lines == [
            "fsdp: against torchrun: node 9.00x",
            "verdict: cannot tell: 2 repeats are too few; use --repeats 3 or more",
        ]

    def test_one_side_only(self) -> None:
        """Without a torchrun, or without numapin, nothing can be said."""
        cannot = ["verdict: cannot tell: torchrun and numapin were not both measured in any case"]
        assert offload_verdict([_case(node=EQUAL, roles=EQUAL), _case(torchrun=EQUAL, node=())]) == cannot
