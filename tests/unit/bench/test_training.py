"""The training benchmark: its networks, its samples, the order of its measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import default_collate

from bench.models import WORKLOADS
from bench.training import Settings, cells, main
from bench.training_cell import Samples, Timing, _require_intact

QUICK = WORKLOADS["cnn3d"].quick()
TIMING = Timing(num_workers=1, prefetch=2, warm_up_s=0.0, seconds=1.0, num_steps=None)


@pytest.mark.parametrize(("name", "num_parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_residual_networks_match_torchvision(name: str, num_parameters: int) -> None:
    """With 1000 classes they have the same number of parameters, and one output per class."""
    workload = WORKLOADS[name]
    network = workload.build(workload.num_classes)
    assert sum(parameter.numel() for parameter in network.parameters()) == num_parameters
    with torch.no_grad():
        assert network(torch.zeros(2, *workload.quick().shape)).shape == (2, 1000)


def test_every_batch_is_checked() -> None:
    """A collated batch passes; a sample with another sample's label, or another shape, does not."""
    samples = Samples(QUICK, seed=0)
    images, labels = default_collate([samples[index] for index in range(14, 14 + QUICK.batch_size)])
    _require_intact([images, labels], QUICK)
    with pytest.raises(RuntimeError, match="cnn3d: a batch of shape"):
        _require_intact([images, labels.flip(0)], QUICK)
    with pytest.raises(RuntimeError, match="cnn3d: a batch of shape"):
        _require_intact([images[1:], labels[1:]], QUICK)


def test_loaders_take_turns() -> None:
    """Each repeat measures all networks; the second one reverses the loaders, so that drift cancels out."""
    settings = Settings(
        models=("resnet18", "cnn3d"),
        loaders=("ceiling", "torch"),
        repeats=2,
        timing=TIMING,
        limit_s=1.0,
        launcher="torchrun",
        compiled=False,
        quick=False,
        json=None,
    )
    assert list(cells(settings)) == [
        (0, "resnet18", "ceiling"),
        (0, "resnet18", "torch"),
        (0, "cnn3d", "ceiling"),
        (0, "cnn3d", "torch"),
        (1, "resnet18", "torch"),
        (1, "resnet18", "ceiling"),
        (1, "cnn3d", "torch"),
        (1, "cnn3d", "ceiling"),
    ]
    assert [workload.batch_size for workload in replace(settings, quick=True).workloads] == [4, 4]


def test_without_a_gpu_only_a_smoke_test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full sizes would take hours on a CPU; the message names the option that works."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == "bench.training: torch sees no GPU; only --quick runs without one"


def test_an_unknown_network_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists the known networks."""
    with pytest.raises(SystemExit) as ended:
        main(["--models", "resnet18,vgg"])
    assert ended.value.code == 2
    assert "'vgg' is unknown; choose from resnet18, cnn3d, resnet50" in capsys.readouterr().err
