"""The advice of `numapin trace` that needs the hook's notes: loaders in use, epochs, Python, optimizers, slow ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.trace.made import Made, loop
from tests.unit.trace.seam import ScriptNotes, analyze, find, make_report, read_noted, read_trace

if TYPE_CHECKING:
    from tests.unit.trace.seam import Analysis, TraceFinding

STACKS = [["augment (train.py:7)", "augment (train.py:7)"], ["log (train.py:9)", "send (sockets.py:1)"]]


def analyzed(made: Made, **ours: object) -> Analysis:
    """Return the analysis of a synthetic trace."""
    return analyze(read_trace(made.content(**ours), source="x"))


def found(made: Made) -> dict[str, TraceFinding]:
    """Return the findings by name."""
    return {finding.what: finding for finding in find(analyzed(made))}


def with_loader(made: Made, **loader: object) -> Made:
    """Return the trace, with a loader of numapin in its notes."""
    made.noted["loaders"] = [{"is_numapin": True, "num_workers": 2} | loader]
    return made


def on_cpu(*steps: tuple[float, float]) -> Made:
    """Return a trace without a GPU, of steps that compute and then do something else."""
    made, now = Made(), 0.0
    for i, (compute, idle) in enumerate(steps):
        made.step(i, now, compute + idle)
        made.event("cpu_op", "aten::mm", now, compute)
        now += compute + idle
    made.noted["stacks"] = STACKS
    return made


class TestLoadersInUse:
    """A script that already uses numapin's loader is not told to use it."""

    @pytest.mark.parametrize(
        ("made", "what"),
        [
            (loop(copy=200, compute=800, memory="Pageable", called=220), "pageable copies"),
            (loop(wait=300, compute=700), "waiting for data"),
        ],
        ids=["pageable", "waiting"],
    )
    def test_numapins(self, made: Made, what: str) -> None:
        """The remedy names the next step instead, and no other launcher option."""
        assert "numapin run --dataloader=numapin" in found(made)[what].remedy
        remedy = found(with_loader(made))[what].remedy
        assert "--dataloader" not in remedy
        assert "numapin's loader is in use" in remedy

    def test_batches_on_the_gpu(self) -> None:
        """Copies beside a loader that delivers on the GPU are the script's own."""
        made = with_loader(loop(copy=200, compute=800), delivers_on_gpu=True)
        assert "numapin.DataLoader" not in found(made)["asynchronous, but not overlapped"].remedy
        made = with_loader(loop(copy=200, compute=800, memory="Pageable", called=220), delivers_on_gpu=True)
        assert "the script's own" in found(made)["pageable copies"].remedy

    def test_without_workers(self) -> None:
        """A launcher option that changes nothing for a loader without workers is not advised."""
        made = with_loader(loop(copy=200, compute=800, memory="Pageable", called=220), is_numapin=False, num_workers=0)
        remedy = found(made)["pageable copies"].remedy
        assert "pin_memory=True" in remedy
        assert "--dataloader" not in remedy

    def test_pinning(self) -> None:
        """A script that pins batches of numapin's loader is told to leave that out."""
        made = with_loader(loop(steps=1, compute=800, idle=200))
        made.event("cpu_op", "aten::pin_memory", 800, 200)
        assert found(made)["pinning in the loop"].remedy.startswith("remove .pin_memory()")

    @pytest.mark.parametrize(("num_cpus", "said"), [(2, "2 workers share 2 CPUs"), (8, "num_workers=2 now")])
    def test_workers_and_cpus(self, num_cpus: int, said: str) -> None:
        """More workers are advised only while the rank has CPUs left."""
        made = with_loader(loop(wait=300, compute=700))
        made.noted["num_cpus"] = num_cpus
        assert said in found(made)["waiting for data"].remedy


class TestWorkersAtTheirLimit:
    """Workers that make batches all of the time limit any loader."""

    def test_no_other_loader_is_advised(self) -> None:
        """The remedy has the workers' load, and neither another loader nor balance=True."""
        made = loop(wait=600, compute=400)  # a batch takes a worker 1200 of the 1000 us of a step
        made.noted["loaders"] = [{"num_workers": 1}]
        made.noted["num_cpus"] = 8
        remedy = found(made)["waiting for data"].remedy
        assert remedy.startswith("the workers are the limit (100% of their time goes to samples): use more workers")
        assert "numapin" not in remedy
        for i in range(20):  # of earlier epochs, and of a validation
            made.load(-50_000 + i, 900, worker=100 + i)
        assert found(made)["waiting for data"].remedy == remedy
        one_worker = with_loader(loop(wait=300, compute=700), num_workers=1)
        assert "balance" not in found(one_worker)["waiting for data"].remedy


class TestOtherPrograms:
    """Other programs on the CPUs of a rank."""

    @pytest.mark.parametrize(
        ("traced_ms", "other_ms", "is_said"),
        [(10_000, 5000, True), (10_000, 600, False), (100, 50, False), (10_000, None, False)],
        ids=["busy", "little", "too short to tell", "unknown"],
    )
    def test_noted(self, traced_ms: int, other_ms: int | None, is_said: bool) -> None:  # noqa: FBT001 - a parameter
        """Their CPU time is noted if it is more than chance and a twentieth of the CPUs' time."""
        made = loop(compute=1000)
        made.noted |= {"num_cpus": 2, "traced_ms": traced_ms, "other_cpu_ms": other_ms}
        notes = [note for note in make_report([analyzed(made)]).notes if "other programs" in note]
        said = "other programs used 0.5 of the 2 CPUs of rank 0 during the traced steps, and may have slowed them"
        assert notes == [said] * is_said

    def test_of_several_ranks(self) -> None:
        """One note has the rank whose CPUs they used most."""
        ranks = []
        for rank, other_ms in enumerate([4000, 8000, 0]):
            made = loop(compute=1000)
            made.noted |= {"num_cpus": 4, "traced_ms": 10_000, "other_cpu_ms": other_ms}
            ranks.append(analyzed(made, rank=rank))
        notes = [note for note in make_report(ranks).notes if "other programs" in note]
        assert len(notes) == 1
        assert "up to 0.8 of the 4 CPUs of rank 1" in notes[0]


class TestNoContradiction:
    """Time has one cause."""

    def test_waiting_or_compute(self) -> None:
        """A loop that waits for a twentieth of its time is not called bound by compute."""
        assert set(found(loop(wait=60, compute=940))) == {"waiting for data"}
        assert set(found(loop(wait=40, compute=960))) == {"bound by compute"}

    def test_bound_by_compute_or_a_copy(self) -> None:
        """A loop with exposed copies is not called bound by compute, too."""
        assert set(found(loop(copy=80, compute=920))) == {"asynchronous, but not overlapped"}

    def test_waiting_at_the_border_of_an_epoch(self) -> None:
        """The time in next() at the border of an epoch is not in the evidence of waiting for data."""
        made = loop(steps=4, wait=200, compute=800)
        made.event("user_annotation", "ProfilerStep#4", 4000, 5000)
        made.noted_at("epochs", 4000, 1000)
        made.wait(5000, 4000)
        finding = found(made)["waiting for data"]
        assert "for 0.16 ms per step, 0.16 ms of it while nothing computed" in finding.evidence

    def test_waiting_for_ranks_is_not_compute(self) -> None:
        """Communication that nothing hides is waiting for other ranks."""
        made = loop(steps=2, compute=500, idle=500)
        for i in range(2):
            made.kernel(i * 1000 + 500, 500, name="ncclDevKernel_AllReduce")
        assert set(found(made)) == {"waiting for other ranks"}

    def test_ranked_by_seconds(self) -> None:
        """Findings are in the order of the seconds that they save; those are shares of the rank's own step."""
        report = make_report([analyzed(loop(wait=200, copy=500, compute=300))])
        saved = [shared.saves_s for shared in report.findings]
        assert saved == [pytest.approx(0.0005), pytest.approx(0.0002)]


class TestEpochs:
    """The borders of epochs."""

    @staticmethod
    def _made() -> Made:
        """Return 8 steps of which the fifth begins an epoch: the old workers end, new ones start, a batch comes."""
        made, now = Made(), 0
        for i in range(8):
            extra = 3000 if i == 4 else 0
            made.step(i, now, 1000 + extra)
            if extra:
                made.wait(now, 500)
                made.noted_at("ends", now, 500)
                made.noted_at("epochs", now + 500, 1500)
                made.wait(now + 2000, 1000)
            made.kernel(now + extra, 1000)
            now += 1000 + extra
        return made

    def test_workers_that_start_again(self) -> None:
        """From the end of the old workers to the first batch, time is the epoch's, and the remedy keeps the workers."""
        analysis = analyzed(self._made())
        assert (analysis.parts_us["epoch"], analysis.parts_us["wait"], analysis.num_epochs) == (3000, 0, 1)
        finding = found(self._made())["start of an epoch"]
        assert "persistent_workers=True" in finding.remedy
        assert "took 3.0 ms" in finding.evidence
        assert finding.costs == pytest.approx(3000 / 11000)
        assert "waiting for data" not in found(self._made())

    def test_long_epochs(self) -> None:
        """If epochs are longer than what was traced, the cost is that of a whole epoch."""
        made = with_loader(self._made(), is_numapin=False, num_batches=20)
        assert found(made)["start of an epoch"].costs == pytest.approx(3000 / 11000 * 2 / 20)

    def test_workers_that_stay(self) -> None:
        """Workers that are already persistent are not advised."""
        made = with_loader(self._made(), is_persistent=True)
        assert "persistent_workers=True)" in found(made)["start of an epoch"].remedy
        assert "keep the workers" not in found(made)["start of an epoch"].remedy

    def test_rare_borders(self) -> None:
        """A border that costs little over its long epoch does not keep the loop from being bound by compute."""
        made = with_loader(loop(steps=10, wait=3, compute=997), is_numapin=False, num_batches=1000)
        made.event("user_annotation", "ProfilerStep#10", 10_000, 700)
        made.noted_at("epochs", 10_000, 700)
        assert analyzed(made).share("epoch") > 0.06
        assert set(found(made)) == {"bound by compute"}

    def test_an_end_without_a_start(self) -> None:
        """If an epoch only ended in the traced steps, the evidence says that."""
        made = loop(steps=4, compute=1000)
        made.event("user_annotation", "ProfilerStep#4", 4000, 800)
        made.noted_at("ends", 4000, 800)
        finding = found(made)["start of an epoch"]
        assert finding.evidence == "an epoch ended, and ending its workers took 0.8 ms"

    def test_an_iterator_that_is_used_later(self) -> None:
        """What the script does between iter() and the first next() is not the epoch's; each start counts once."""
        made = Made()
        made.step(0, 0, 1000)
        made.noted_at("epochs", 0, 100)
        made.noted_at("epochs", 100, 50, loader=1)
        made.event("cpu_op", "aten::mm", 150, 750)
        made.wait(900, 100)
        analysis = analyzed(made)
        assert analysis.parts_us["epoch"] == pytest.approx(250)
        assert analysis.parts_us["compute"] == pytest.approx(750)
        assert analysis.num_epochs == 2

    def test_of_two_loaders(self) -> None:
        """The remedy is for the loader whose epoch began slowly, and the cost is spread over the longest epoch."""
        made = loop(steps=8, wait=10, compute=990)
        made.noted_at("epochs", 2000, 0.5, loader=0)  # its workers stay
        made.noted_at("epochs", 5990, 8, loader=1)
        training = {"num_workers": 4, "is_persistent": True, "num_batches": 10}
        validation = {"num_workers": 2, "num_batches": 5}
        made.event("user_annotation", "ProfilerStep#8", 8000, 700)
        made.noted_at("epochs", 8000, 700, loader=1)
        made.noted["loaders"] = [training, validation]
        finding = found(made)["start of an epoch"]
        assert finding.remedy.startswith("keep the workers of the loader with 5 batches and 2 workers between epochs")
        assert finding.costs == pytest.approx(analyzed(made).share("epoch") * 8 / 2 / 10)
        made.noted["loaders"] = [validation, training]
        assert "the loader with 10 batches and 4 workers are already persistent" in (
            found(made)["start of an epoch"].remedy
        )


class TestHost:
    """Time in which nothing was loaded, copied or computed."""

    @pytest.mark.parametrize(
        ("stack", "running", "what", "said"),
        [
            (0, True, "Python between operators", "augment (train.py:7) (100% of the samples)"),
            (1, False, "the script sleeps or waits", "log (train.py:9), in send (sockets.py:1) (100% of the samples)"),
        ],
    )
    def test_on_the_cpu(self, stack: int, running: bool, what: str, said: str) -> None:  # noqa: FBT001 - a parameter
        """The function where the loop's thread was is named, and whether it slept."""
        made = on_cpu(*[(100, 900)] * 4)
        for i in range(4):
            made.samples(i * 1000 + 100, 900, stack=stack, running=running, every=50)
            made.samples(i * 1000, 100, stack=1 - stack, every=20)  # while operators run: explained by them
        (finding,) = find(analyzed(made))
        assert finding.what == what
        assert finding.costs == pytest.approx(0.9)
        assert said in finding.evidence
        assert STACKS[stack][0] in finding.remedy

    def test_an_idle_gpu(self) -> None:
        """The finding names what the host does while the GPU is idle."""
        made = loop(compute=500, idle=500)
        made.noted["stacks"] = STACKS
        for i in range(4):
            made.samples(i * 1000 + 500, 500, every=50)
        assert "augment (train.py:7)" in found(made)["GPU idle"].evidence

    def test_an_optimizer_on_the_cpu(self) -> None:
        """An optimizer that steps without kernels while the GPU is idle is named, with its threads."""
        made = loop(steps=2, compute=400, idle=600)
        for i in range(2):
            made.event("user_annotation", "Optimizer.step#AdamW.step", i * 1000 + 450, 500)
        made.noted |= {"optimizer": "AdamW", "num_threads": 1, "num_cpus": 8, "cpus": "0-7", "nodes": "0"}
        finding = found(made)["optimizer on the CPU"]
        assert finding.costs == pytest.approx(0.5)
        assert "AdamW steps with 1 thread on CPUs 0-7, node 0 for 0.50 ms per step" in finding.evidence
        assert "OMP_NUM_THREADS=4" in finding.remedy
        assert "GPU idle" not in found(made)  # the rest is too short
        made.event("cuda_runtime", "cudaLaunchKernel", 500, 5)
        assert "optimizer on the CPU" not in found(made)
        made.noted["updates_on_cpu"] = True
        assert "optimizer on the CPU" in found(made)


class TestUnevenSteps:
    """Steps that take much longer than the others."""

    def test_python(self) -> None:
        """The slow steps' function is named; what all steps do is a finding of its own."""
        made = on_cpu(*[(300, 700)] * 5, (300, 5700))
        made.samples(300, 4700, every=100)
        made.samples(5300, 5700, stack=1, running=False, every=100)
        uneven, usual = found(made)["uneven steps"], found(made)["Python between operators"]
        assert "slow steps: 1 of 6; step 5 took 6.0 ms, the median step 1.0 ms" in uneven.evidence
        assert "log (train.py:9)" in uneven.evidence
        assert uneven.costs == pytest.approx(5000 / 11000)
        assert "augment (train.py:7)" in usual.evidence
        assert usual.costs == pytest.approx(6 * 700 / 11000)

    def test_python_that_no_sample_saw(self) -> None:
        """Without samples there, the remedy says where to look."""
        finding = found(on_cpu(*[(300, 200)] * 5, (300, 5700)))["uneven steps"]
        assert "there, the loop" not in finding.evidence
        assert "Chrome trace" in finding.remedy

    def test_compute(self) -> None:
        """For steps that compute longer, the advice is to even out their inputs."""
        finding = found(on_cpu(*[(1000, 0)] * 6, (4000, 0)))["uneven steps"]
        assert "most of the difference is in compute" in finding.evidence
        assert "bucket" in finding.remedy

    @pytest.mark.parametrize(
        ("last", "logged", "is_same"), [([8, 4], True, True), ([8, 9], False, False), (None, False, False)]
    )
    def test_equal_shapes(self, last: list[int] | None, logged: bool, is_same: bool) -> None:  # noqa: FBT001 - parameters
        """If all steps compute with the same shapes, the advice is not to even them out, whatever else a step logs.

        A trace without shapes says nothing about them.
        """
        made, now = Made(), 0.0
        for i, length in enumerate([1000] * 6 + [4000]):
            made.step(i, now, length)
            shapes = {} if last is None else {"Input Dims": [last if i == 6 else [8, 4], [4, 4]]}
            made.event("cpu_op", "aten::addmm", now, length, **shapes)
            now += length
        if logged:
            made.event("cpu_op", "aten::mean", 6100, 10, **{"Input Dims": [[8, 1000]]})
        remedy = found(made)["uneven steps"].remedy
        assert ("bucket" in remedy, "clocks" in remedy) == (not is_same, is_same)

    def test_communication(self) -> None:
        """A single long collective is one finding, and not waiting for other ranks as well; so is a single copy."""
        made = loop(steps=8, compute=1000)
        made.event("user_annotation", "ProfilerStep#8", 8000, 5000)
        made.kernel(8000, 5000, name="ncclDevKernel_AllReduce")
        assert set(found(made)) == {"uneven steps"}
        made = loop(steps=8, compute=1000)
        made.event("user_annotation", "ProfilerStep#8", 8000, 5000)
        made.copy(8000, 5000, memory="Pageable")
        assert set(found(made)) == {"uneven steps"}

    def test_an_optimizer_that_steps_rarely(self) -> None:
        """An optimizer on the CPU that steps in one of several batches is not what makes steps uneven."""
        made = loop(steps=7, compute=1000)
        made.event("user_annotation", "ProfilerStep#7", 7000, 4000)
        made.event("user_annotation", "Optimizer.step#AdamW.step", 7000, 4000)
        assert set(found(made)) == {"optimizer on the CPU"}

    def test_even(self) -> None:
        """Steps that differ a little, and those that wait for data, are not uneven."""
        assert "uneven steps" not in found(on_cpu(*[(1000, 0)] * 6, (1400, 0)))
        assert "uneven steps" not in found(loop(steps=6, wait=900, compute=100))


class TestOneSlowRank:
    """Ranks that wait for each other."""

    @staticmethod
    def _rank(rank: int, *own: float, step: float = 1000) -> Analysis:
        """Return a rank that computes for these times, or the same time in each of 6 steps, and then communicates."""
        made = Made()
        for i, computing in enumerate(own if len(own) > 1 else own * 6):
            made.step(i, i * step, step)
            made.kernel(i * step, computing)
            made.kernel(i * step + computing, step - computing, name="ncclDevKernel_AllReduce")
        made.noted |= {"host": "node7", "cpus": "8-15", "nodes": "1"}
        return analyzed(made, rank=rank)

    def test_named_with_its_place(self) -> None:
        """The slow rank is named with host, CPUs, node and part; the others' waiting is not a second finding."""
        report = make_report([self._rank(0, 600), self._rank(1, 950), self._rank(2, 600)])
        (shared,) = (one for one in report.findings if one.saves_s)
        assert (shared.finding.what, shared.ranks) == ("one slow rank", ("1",))
        assert shared.saves_s == pytest.approx(350e-6)
        assert "rank 1 (host node7, CPUs 8-15, node 1) spends 0.9 ms per step outside" in shared.finding.evidence
        assert "most of the difference is in compute" in shared.finding.evidence

    def test_communication_of_the_slow_rank(self) -> None:
        """Communication that even the slow rank has is transfer, and stays the larger finding."""
        report = make_report([self._rank(0, 200), self._rank(1, 260)])
        transfer, slow = (shared for shared in report.findings if shared.saves_s)
        assert (transfer.finding.what, transfer.ranks) == ("communication", ("1",))
        assert transfer.finding.costs == pytest.approx(0.74)
        assert "0.74 ms per step only collective operations ran on the slowest rank" in transfer.finding.evidence
        assert "equally fast" not in transfer.finding.remedy
        assert slow.finding.what == "one slow rank"
        assert slow.saves_s == pytest.approx(60e-6)

    def test_parts_that_take_turns(self) -> None:
        """The part that is named takes longer in the late steps, although no part does so in most of them."""
        made = Made()
        for i, (copying, computing) in enumerate([(350, 600), (350, 600), (0, 600), (0, 600), (0, 950)]):
            made.step(i, i * 1000, 1000)
            made.copy(i * 1000, copying, memory="Pinned")
            made.kernel(i * 1000 + copying, computing)
            made.kernel(i * 1000 + 950, 50, name="ncclDevKernel_AllReduce")
        report = make_report([self._rank(0, 600), analyzed(made, rank=1)])
        (shared,) = (one for one in report.findings if one.finding.what == "one slow rank")
        assert "most of the difference is in copies" in shared.finding.evidence

    def test_one_long_step_names_no_part(self) -> None:
        """A rank that computes longer in each step, and copies for long in one of them, computes longer."""
        made, now = Made(), 0.0
        for i in range(8):
            copying = 9000 if i == 3 else 0
            made.step(i, now, 1000 + copying)
            made.copy(now, copying, memory="Pinned")
            made.kernel(now + copying, 900)
            made.kernel(now + copying + 950, 50, name="ncclDevKernel_AllReduce")
            now += 1000 + copying
        report = make_report([self._rank(0, 600), analyzed(made, rank=1)])
        (shared,) = (one for one in report.findings if one.finding.what == "one slow rank")
        assert "most of the difference is in compute" in shared.finding.evidence

    @pytest.mark.parametrize("late", [(950, *[600] * 5), (950, 950, 950, 600, 600, 600), (950,) * 4])
    def test_not_late_in_most_steps(self, late: tuple[float, ...]) -> None:
        """A rank that is late in half of its steps, or in few steps, is not called slow."""
        report = make_report([self._rank(0, *[600] * len(late)), self._rank(1, *late), self._rank(2, 600)])
        assert "one slow rank" not in {shared.finding.what for shared in report.findings}

    @pytest.mark.parametrize(
        ("num_steps", "ranks"),
        [
            ((4, 3), "all ranks have"),
            ((6, 4, 6), "rank 1 has"),
            ((6, 4, 4), "2 of 3 ranks have"),
            ((6, 5), None),
            ((1,), None),
        ],
    )
    def test_too_few_steps_are_noted(self, num_steps: tuple[int, ...], ranks: str | None) -> None:
        """Ranks with too few steps to call them slow are noted once, unless there is no other rank."""
        made = [analyzed(loop(steps=number, compute=600), rank=rank) for rank, number in enumerate(num_steps)]
        notes = [one for one in make_report(made).notes if "slow rank" in one]
        expected = f"{ranks} fewer than 5 steps, too few to look for a slow rank: trace more (--steps 5)"
        assert notes == ([] if ranks is None else [expected])

    def test_a_rank_that_saves_in_one_step(self) -> None:
        """Time that a rank loses in one step, and others waiting for it, are one finding, with that rank's evidence."""
        made, now = [Made(), Made()], 0
        for i in range(8):
            extra = 9000 if i == 5 else 0
            for rank, one in enumerate(made):
                one.step(i, now, 1000 + extra)
                one.kernel(now, 950)
                one.kernel(now + 950 + (extra - 10) * rank * bool(extra), 50 + extra * (1 - rank), name="ncclAllReduce")
            now += 1000 + extra
        report = make_report([analyzed(one, rank=rank) for rank, one in enumerate(made)])
        (uneven,) = (shared for shared in report.findings if shared.saves_s)
        assert (uneven.finding.what, set(uneven.ranks)) == ("uneven steps", {"0", "1"})
        assert "on rank 1, slow steps: 1 of 8" in uneven.finding.evidence
        assert "most of the difference is in other work of the loop" in uneven.finding.evidence

    def test_equal_ranks(self) -> None:
        """Equal ranks have no slow one; their communication is a finding."""
        report = make_report([self._rank(i, 600) for i in range(3)])
        assert [shared.finding.what for shared in report.findings] == ["waiting for other ranks"]


@pytest.mark.parametrize(
    "noted",
    [
        7,
        {"loaders": 3, "epochs": [1, [1], ["a", 2, 3]], "samples": [[1, 5, 0], [1, -1, 0], [1.5, 0, 0]], "stacks": 4},
        {"loaders": [{"num_workers": -1, "num_batches": True}], "stacks": [[1, 2], []], "cpus": 5, "num_cpus": "x"},
    ],
)
def test_notes_that_are_malformed(noted: Any) -> None:
    """Malformed notes of any kind are left out."""
    read = read_noted(noted, 0)
    assert (read.epochs, read.samples, read.origin) == ((), (), ScriptNotes().origin)
