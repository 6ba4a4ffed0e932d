"""The cases of the benchmarks of copies, allocation and overlap, and the use of their results."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.unit.bench.seam import (
    Benchmark,
    BenchReport,
    Case,
    Peer,
    Run,
    alloc,
    bench_table,
    overlap,
    parse_sizes,
    share_within,
    summarize,
    transfer_benchmark,
)

OPTIONS: dict[str, Any] = {
    "sizes": (4096, 1 << 20),
    "peers": ("pageable", "pinned", "registered", "slot"),
    "directions": ("h2d", "d2h", "both"),
    "seconds": 0.1,
}


class TestTransfer:
    """`bench transfer`."""

    def test_one_gpu_on_one_node(self) -> None:
        """There is a case per direction and size, with four kinds of memory, all in the same processes."""
        benchmark = transfer_benchmark(**OPTIONS, gpu_nodes=[0], nodes=[0], no_gpu=None)
        assert [case.group for case in benchmark.cases][::2] == ["h2d gpu0 node0", "d2h gpu0 node0", "both gpu0 node0"]
        assert [case.num_bytes for case in benchmark.cases[:2]] == [4096, 1 << 20]
        assert {len(case.peers) for case in benchmark.cases} == {4}
        assert {case.session for case in benchmark.cases} == {"gpu0 node0"}
        assert len({case.name for case in benchmark.cases}) == 6

    def test_each_gpu_from_each_node_and_all_at_once(self) -> None:
        """Every pair has its own sweep and processes; when all run at once, each GPU uses its own node."""
        one_size = OPTIONS | {"sizes": (4096,), "directions": ("h2d",), "peers": ("pinned",)}
        benchmark = transfer_benchmark(**one_size, gpu_nodes=[1, None], nodes=[0, 1], no_gpu=None)
        alone = ["h2d gpu0 node0", "h2d gpu0 node1", "h2d gpu1 node0", "h2d gpu1 node1"]
        assert [case.group for case in benchmark.cases] == [*alone, "h2d 2 GPUs at once"]
        assert len({case.session for case in benchmark.cases}) == 5
        places = [[(spec["gpu"], spec["node"]) for spec in case.peers[0].specs] for case in benchmark.cases]
        assert places == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [(0, 1), (1, None)]]
        assert "gbps" in benchmark.summed

    def test_without_a_gpu(self) -> None:
        """There is one case, skipped with the reason."""
        (case,) = transfer_benchmark(**OPTIONS, gpu_nodes=[], nodes=[0, 1], no_gpu="no driver").cases
        assert (case.skipped, case.peers) == ("no driver", ())


class TestAlloc:
    """`bench alloc`."""

    def test_without_a_gpu(self) -> None:
        """Ordinary memory is measured; one skipped case names the other kinds."""
        first, last = alloc.alloc_benchmark(sizes=(4096,), peers=tuple(alloc.PEERS), num_samples=1, no_gpu="none").cases
        assert [peer.name for peer in first.peers] == ["pageable", "fresh"]
        assert (last.skipped, last.peers) == ("none", ())
        assert "pinned-cold" in last.about

    def test_only_what_needs_a_gpu_without_one(self) -> None:
        """Without peers that can run, there is only the skipped case."""
        (case,) = alloc.alloc_benchmark(
            sizes=(4096,), peers=("numapin",), num_samples=1, no_gpu="torch sees no GPU"
        ).cases
        assert case.skipped == "torch sees no GPU"

    def test_with_a_gpu(self) -> None:
        """Every peer is measured at each size."""
        cases = alloc.alloc_benchmark(sizes=(4096, 8192), peers=tuple(alloc.PEERS), num_samples=5, no_gpu=None).cases
        assert [[peer.name for peer in case.peers] for case in cases] == [list(alloc.PEERS)] * 2
        assert {spec["gpu"] for case in cases for peer in case.peers for spec in peer.specs} == {0}


class TestOverlap:
    """`bench overlap`."""

    def test_cases(self) -> None:
        """Every kind of step has each way to copy; without a GPU each is skipped with the reason."""
        kinds = tuple(overlap.STEPS)
        there = overlap.overlap_benchmark(steps=kinds, peers=tuple(overlap.PEERS), seconds=1, no_gpu=None)
        assert {len(case.peers) for case in there.cases} == {4}
        absent = overlap.overlap_benchmark(steps=kinds, peers=tuple(overlap.PEERS), seconds=1, no_gpu="none")
        assert {case.skipped for case in absent.cases} == {"none"}
        assert [case.name for case in there.cases] == [case.name for case in absent.cases] == list(kinds)

    def test_tensors_share_the_bytes_evenly(self) -> None:
        """The bytes of a batch are divisible by its number of tensors."""
        assert all(step.num_bytes % step.num_tensors == 0 for step in overlap.STEPS.values())

    @pytest.mark.parametrize(
        ("parts", "wholes", "share"),
        [
            ([(0, 10)], [(0, 10)], 1.0),
            ([(0, 10)], [], 0.0),
            ([(0, 10)], [(10, 20)], 0.0),
            ([(0, 10)], [(5, 20)], 0.5),
            ([(0, 10)], [(1, 2), (3, 5), (9, 30)], 0.4),
            ([(0, 2), (4, 8)], [(1, 6)], 0.5),
            ([(0, 1), (9, 10)], [(0, 10)], 1.0),
            ([(5, 5)], [(0, 10)], None),
            ([], [(0, 10)], None),
        ],
    )
    def test_share_within(self, parts: Any, wholes: Any, share: float | None) -> None:
        """The share is the time of the first within the second; it is unknown if the first takes no time."""
        found = share_within(parts, wholes)
        assert found == (None if share is None else pytest.approx(share))


class TestSizes:
    """How sizes are given."""

    @pytest.mark.parametrize(
        ("text", "sizes"),
        [("4K", (4096,)), ("1.5M", (3 << 19,)), ("1G, 64m,1", (1, 64 << 20, 1 << 30)), ("1KiB,1KB,1024", (1024,))],
    )
    def test_good_ones(self, text: str, sizes: tuple[int, ...]) -> None:
        """In units of 1024, in any order; each counts once, and they rise."""
        assert parse_sizes(text) == sizes

    @pytest.mark.parametrize("text", ["", "0", "4X", "-1", "1.5.1M", "4K,,8K", "9" * 40, "٤K", "K"])
    def test_bad_ones(self, text: str) -> None:
        """An error about an invalid size quotes it as it was typed."""
        with pytest.raises(ValueError, match="is not a size"):
            parse_sizes(text)

    def test_more_than_there_is(self) -> None:
        """A tebibyte is the most."""
        with pytest.raises(ValueError, match=r"more than 1\.0 TiB"):
            parse_sizes("1025G")


class TestSweepTable:
    """Sweeps over sizes, as text."""

    def test_rows_and_columns(self) -> None:
        """There is a row per size and a column per peer, with the median in three digits and the largest deviation."""
        peers = (Peer(name="ours", specs=()), Peer(name="theirs", specs=()))
        cases = (
            Case(name="a 4096", about="", group="a", num_bytes=4096, peers=peers),
            Case(name="a 65536", about="", group="a", num_bytes=65536, peers=peers),
            Case(name="others", about="left out", skipped="no GPU"),
        )
        values = {"ours": (10_004.0, 20_000.0, 30_000.0), "theirs": (0.0123456,)}
        runs = [
            Run(case="a 65536", peer=peer, repeat=i, figures={"alloc_us": value})
            for peer, own in values.items()
            for i, value in enumerate(own)
        ]
        runs.append(Run(case="a 4096", peer="theirs", repeat=0, skipped="failed: out of memory"))
        benchmark = Benchmark(name="alloc", module="", cases=cases)
        machine: dict[str, object] = {"num_cpus": 2}
        report = BenchReport(
            benchmark="alloc", command=(), machine=machine, settings={}, cases=summarize(benchmark, runs)
        )
        console = Console(width=100, file=StringIO())
        with console.capture() as text:
            benchmark = alloc.alloc_benchmark(sizes=(), peers=(), num_samples=1, no_gpu=None)
            console.print(bench_table(report, benchmark.columns, benchmark.legend))
        lines = [line.split() for line in text.get().splitlines()[3:]]
        assert lines[:4] == [
            ["a"],
            ["allocate", "ours", "theirs"],
            ["4", "KiB", "-", "-"],
            ["64", "KiB", "20,000±50%", "0.0123"],
        ]
        assert [" ".join(line) for line in lines[4:]] == [
            "",
            "skipped: theirs (in a 4096): failed: out of memory",
            "skipped: others (left out): no GPU",
        ]
