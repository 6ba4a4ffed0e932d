"""`bench.train` of the repository as a developer runs it, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.train import Model, Samples, cnn3d
from tests.integration.launching import no_compiler, numapin

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_train_with_every_loader(tmp_path: Path) -> None:
    """Loaders take turns in the same two ranks; figures count both ranks, and the report ends with a verdict."""
    path = tmp_path / "train.json"
    options = ("--quick", "--models", "cnn3d", "--output", str(path))
    variables = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path), "PYTHONPATH": no_compiler(tmp_path)}
    (tmp_path / "no-compiler" / "numpy.py").write_text("raise ModuleNotFoundError(name='numpy')")
    run = ("run", "--quiet", "--nproc-per-node", "2", "-m", "bench.train")
    done = numapin(*run, *options, cwd=_ROOT, **variables)
    assert done.status == 0, done.err
    report = json.loads(path.read_text())
    assert (report["schema"], report["benchmark"]) == ("numapin.bench/1", "train")
    assert (report["is_complete"], report["settings"]["num_ranks"]) == (True, 2)
    (case,) = report["cases"]
    figures = {peer["name"]: peer["figures"] for peer in case["peers"]}
    assert list(figures) == ["torch", "numapin", "ceiling"]
    assert all(peer["num_runs"] == 1 for peer in case["peers"])
    rates = [figures[name]["samples_per_s"]["median"] for name in ("numapin", "torch")]
    assert figures["numapin"]["ratio"]["median"] == pytest.approx(rates[0] / rates[1])
    assert figures["numapin"]["misses"]["median"] == 0
    assert done.out.splitlines()[-1].rstrip() == report["verdict"]["text"]


def test_a_batch_that_differs_is_noticed() -> None:
    """A sample that ends otherwise than in the dataset, and one with another number, are errors."""
    store = dist.HashStore()  # type: ignore[attr-defined] # torch does not list it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Model(build=cnn3d, shape=(1, 4, 4, 4), batch_size=2, num_samples=3, num_classes=10, bf16=False)
        samples = Samples(model)
    finally:
        dist.destroy_process_group()
    inputs, numbers = samples.batch(1)
    assert numbers.tolist() == [2, 0]
    samples.require_intact([inputs, numbers])
    samples.require_intact([torch.stack([samples[i][0] for i in (2, 3)]), numbers])
    changed = inputs.clone()
    changed.view(2, -1)[1, -1] += 1
    for batch in ([changed, numbers], [inputs, numbers.flip(0)], [inputs[:1], numbers]):
        with pytest.raises(ValueError, match="differs from the dataset"):
            samples.require_intact(batch)
