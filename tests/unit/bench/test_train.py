"""`bench train`: its sizes and cases, its networks, its samples and their check, the messages to its ranks."""

from __future__ import annotations

import json
import re
import socket
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from numapin.base.cpu_set import CpuSet
from numapin.bench.cases.train import (
    CASES,
    NO_GPU,
    NO_JPEG,
    NUM_IMAGES,
    PEERS,
    Material,
    TrainBenchOptions,
    case_of,
    needed_shm_bytes,
    sized,
    train_benchmark,
)
from numapin.bench.child import Harness
from numapin.bench.measure.train import Coordinator, _why_not
from numapin.bench.measure.train_data import IGNORED, TrainSet, inputs_and_targets, make_images, pad
from numapin.bench.measure.train_models import Lossy
from numapin.bench.measure.train_rank import _in_words
from numapin.bench.measure.train_step import _num_threads
from numapin.bench.measure.train_usage import cpus_per_rank
from numapin.bench.measure.train_wire import Line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OPTIONS = TrainBenchOptions(num_workers=12, seconds=1.0, warm_up_s=0.0)
QUICK = replace(OPTIONS, is_quick=True)


class TestCases:
    """The models as data."""

    def test_every_case_survives_json(self) -> None:
        """A spec holds plain values, from which the rank gets the same case."""
        for case in CASES.values():
            assert case_of({**asdict(case), "shape": list(case.shape), "material": str(case.material)}) == case

    def test_peers_take_turns_in_the_same_ranks(self) -> None:
        """Each spec names its loader; DALI is only offered where there are images to decode."""
        benchmark = train_benchmark(replace(OPTIONS, cases=("cnn3d", "vit-jpeg")), on_gpu=True, has_jpeg=True)
        cnn3d, vit = benchmark.cases
        assert [peer.name for peer in vit.peers] == list(PEERS)
        assert [peer.name for peer in cnn3d.peers] == [name for name in PEERS if name != "dali"]
        assert cnn3d.session == vit.session is not None
        assert [spec["peer"] for peer in cnn3d.peers for spec in peer.specs] == [peer.name for peer in cnn3d.peers]

    def test_what_cannot_run_is_skipped_with_the_reason(self) -> None:
        """Full sizes need a GPU, JPEG files a library that decodes them."""
        (full,) = train_benchmark(replace(OPTIONS, cases=("lm",)), on_gpu=False, has_jpeg=True).cases
        assert full.skipped == NO_GPU
        small = train_benchmark(replace(QUICK, cases=("lm", "vit-jpeg")), on_gpu=False, has_jpeg=False)
        assert [case.skipped for case in small.cases] == [None, NO_JPEG]

    def test_windows_have_all_distinct_batches(self) -> None:
        """Batches repeat after as many as cover all samples, also if the batch size is the user's."""
        assert [CASES[name].num_distinct for name in ("resnet18", "cnn3d", "lm")] == [2, 4, 16]
        odd = sized(CASES["cnn3d"], replace(OPTIONS, batch_size=48))
        assert (odd.batch_size, odd.num_distinct) == (48, 8)  # 384 = 3 x 128 samples
        assert sized(CASES["cnn3d"], replace(OPTIONS, batch_size=200)).num_samples == 200

    def test_room_for_torchs_batches(self) -> None:
        """12 workers with 2 batches of 154 MB each, in 2 ranks: 7.4 GB of /dev/shm."""
        assert needed_shm_bytes(CASES["resnet18"], replace(OPTIONS, num_ranks=2)) == 12 * 2 * 2 * 256 * 3 * 224**2 * 4


@pytest.mark.parametrize(
    ("others", "share"),
    [
        ("0-7 0-7 0-7", 2.0),  # not bound: all ranks share all CPUs
        ("0-7 8-15 8-15", 4.0),  # two ranks on each node
        ("8-9 10-11 12-13", 8.0),  # exclusive
    ],
)
def test_cpus_of_a_rank(others: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank shares its CPUs with the ranks that may use them, not with those of other nodes."""

    def gather(found: list[set[int]], own: set[int]) -> None:
        found[:] = [own, *(set(CpuSet.parse(text)) for text in others.split())]

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    offloaded = next(case for case in CASES.values() if case.is_offloaded)
    assert cpus_per_rank() == share
    assert _num_threads(offloaded, torch.device("cuda")) == share
    assert _num_threads(offloaded, torch.device("cpu")) == 1


def test_a_small_shm_has_a_remedy() -> None:
    """The command that makes room can be typed as it is; in a container it is an option of its start."""
    reason = _why_not("torch", CASES["resnet18"], replace(OPTIONS, num_workers=10_000_000))
    assert reason is not None
    assert re.search(r": sudo mount -o remount,size=(\d+)G /dev/shm \(docker run --shm-size \1g …\), or use", reason)


class Unheard(Harness):
    """A harness that waits for nothing and keeps no answer."""

    def __init__(self) -> None:
        """Leave stdout as it is."""

    def wait_for_start(self, idle: object) -> None:
        """Start at once."""

    def report(self, figures: object, *, details: object, idle: object) -> None:
        """Drop the figures."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("DataLoader worker (pid(s) 31521) exited unexpectedly"),
            "; see dmesg for the cause; if memory or /dev/shm ran out, use fewer --workers",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "; try a smaller --batch-size"),
        (ValueError("a batch differs"), ""),
    ],
)
def test_the_error_of_a_rank_names_the_next_step(error: Exception, words: str) -> None:
    """A worker or a GPU that ran out of memory has a usual remedy; other errors stay as they are."""
    assert _in_words(error) == f"{type(error).__name__}: {error}{words}"


def test_windows_are_as_long_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that are started after a failed peer make as many steps per window as those before it."""
    asked: list[int | None] = []

    class Ranks:
        """Ranks that would make 36 steps, or the number that is asked for."""

        def __init__(self, options: TrainBenchOptions) -> None:
            """Start nothing."""

        def ask(self, spec: Mapping[str, Any]) -> dict[str, Any]:
            """Return the answer of rank 0."""
            asked.append(spec["options"]["num_steps"])
            return {"figures": {}, "details": {"num_steps": asked[-1] or 36}}

        def close(self) -> None:
            """End nothing."""

    monkeypatch.setattr("numapin.bench.measure.train.TrainJob", Ranks)
    benchmark = train_benchmark(
        replace(OPTIONS, cases=("cnn3d", "resnet18"), peers=("ceiling",), folder=str(tmp_path)),
        on_gpu=True,
        has_jpeg=False,
    )
    specs = [case.peers[0].specs[0] for case in benchmark.cases]
    for spec in (specs[0], specs[0], specs[1]):
        with ExitStack() as stack:  # a process of its own, as after a failure
            Coordinator(stack).measure(json.loads(json.dumps(spec)), Unheard())
    assert asked == [None, 36, None]


@pytest.mark.parametrize(("name", "num_parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_residual_networks_match_torchvision(name: str, num_parameters: int) -> None:
    """With 1000 classes they have the same number of parameters."""
    assert sum(parameter.numel() for parameter in Lossy(CASES[name]).parameters()) == num_parameters


@pytest.mark.parametrize("name", [name for name in CASES if name != "vit-jpeg"])
def test_a_model_learns_from_a_batch(name: str) -> None:
    """The loss of a batch has a gradient for each parameter, and one step along it lowers the loss."""
    torch.manual_seed(0)
    case = sized(CASES[name], QUICK)
    inputs, targets = inputs_and_targets(TrainSet(case, seed=0, folder="").batch(0))
    model = Lossy(case)
    first = model(inputs, targets)
    first.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.001 * parameter.grad)
    assert model(inputs, targets) < first


class TestSamples:
    """The datasets, and the check of what loaders deliver."""

    def test_a_batch_of_floats_is_checked(self) -> None:
        """A collated batch passes; a sample with another sample's number, or a batch of another size, does not."""
        samples = TrainSet(sized(CASES["cnn3d"], QUICK), seed=0, folder="")
        volumes, numbers = default_collate([samples[index] for index in range(14, 18)])
        assert numbers.tolist() == [14, 15, 0, 1]
        samples.require_intact([volumes, numbers])
        for wrong in ([volumes, numbers.flip(0)], [volumes[1:], numbers[1:]], [volumes, numbers + 1000]):
            with pytest.raises(ValueError, match="cnn3d: a batch differs from the dataset"):
                samples.require_intact(wrong)

    def test_sequences_are_padded_to_the_longest(self) -> None:
        """Each place predicts the next token; padding, and the last token of a sequence, predict nothing."""
        batch = pad([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])
        assert isinstance(batch, dict)
        assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
        inputs, targets = inputs_and_targets(batch)
        assert inputs is batch["input_ids"]
        assert targets.tolist() == [[6, 7, IGNORED], [9, IGNORED, IGNORED]]

    def test_a_batch_of_tokens_is_checked(self) -> None:
        """A padded batch passes in any order of its rows; a changed token or mask does not."""
        samples = TrainSet(sized(CASES["lm"], QUICK), seed=0, folder="")
        batch = pad([samples[index] for index in (3, 1, 2, 0)])
        assert isinstance(batch, dict)
        lengths = {int((row != 0).sum()) for row in batch["input_ids"]}
        assert len(lengths) > 1  # ragged
        samples.require_intact(batch)
        changed: Mapping[str, tuple[int, int, int]] = {"input_ids": (0, 1, 1), "attention_mask": (3, 0, 0)}
        for name, (row, place, value) in changed.items():
            wrong = {key: part.clone() for key, part in batch.items()}
            assert wrong[name][row, place] != value
            wrong[name][row, place] = value
            with pytest.raises(ValueError, match="lm: a batch differs"):
                samples.require_intact(wrong)

    def test_images_are_decoded_and_cropped(self, tmp_path: Path) -> None:
        """A sample is the middle of its file's image, the same each time; files repeat after 64."""
        pytest.importorskip("PIL", reason="Pillow is not installed")
        make_images(tmp_path)
        assert len(list(tmp_path.glob("*.jpg"))) == NUM_IMAGES
        case = replace(CASES["vit-jpeg"], batch_size=4, num_samples=2 * NUM_IMAGES)
        assert case.material is Material.JPEG
        samples = TrainSet(case, seed=0, folder=str(tmp_path))
        image, number = samples[NUM_IMAGES + 1]
        assert (image.shape, image.dtype, number) == ((3, 224, 224), torch.uint8, NUM_IMAGES + 1)
        assert torch.equal(image, samples[1][0])
        assert not torch.equal(image, samples[2][0])
        samples.require_intact(samples.batch(0))
        loss = Lossy(sized(case, QUICK))(
            *inputs_and_targets(TrainSet(sized(case, QUICK), seed=0, folder=str(tmp_path)).batch(0))
        )
        assert loss > 0


def test_a_rank_that_ended_is_noticed() -> None:
    """Messages arrive whole and in order; the end of the other side is None, also in the middle of a message."""
    one, other = socket.socketpair()
    with Line(one) as line:
        other.sendall(b'{"a": 1}\n{"b": ')
        assert line.receive() == {"a": 1}
        line.send({"c": 2})
        assert other.recv(100) == b'{"c": 2}\n'
        other.close()
        assert line.receive() is None
