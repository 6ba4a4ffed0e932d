"""JPEG files under ResNet-50: torch's usual pipeline, those of docs/guides/images.md, and the ceiling.

    python -m bench.images --json images.json     files of ImageNet's size, and photos of 1.3 megapixels
    python -m bench.images --kinds photos
    python -m bench.images --quick                smoke test with a few files, also without a GPU

Needs torchvision. It makes the files, and runs the guide's own code. Each repeat runs every pipeline once, and
the next repeat in the other order. A run starts its workers, uses up what they made ahead, and is timed then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from bench.train import resnet
from numapin.base.files import write_text_to
from numapin.base.stats import faster
from numapin.bench.machine import read_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GUIDE: Final = Path(__file__).resolve().parents[1] / "docs" / "guides" / "images.md"
BATCH: Final = 256  # as in the guide
_NUM_SAMPLES: Final = 1 << 20  # at most; no epoch ends within a run
PIPELINES: Final = {
    "ceiling": "batches that are on the GPU already",
    "torch": "torch's DataLoader: PIL and floats in the workers, pin_memory=True, .to(non_blocking=True)",
    "numapin": "decoded in the workers by torchvision, all else on the GPU",
    "numapin, GPU decoder": "files from the workers, all else on the GPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Files to make, and the pipelines to measure: all, or but for those in `without`.

    Sizes vary by a tenth around `height` and `width`; `noise` sets the number of bytes.
    """

    height: int
    width: int
    noise: int
    num_files: int
    without: frozenset[str] = frozenset()


KINDS: Final = {
    "imagenet": Kind(height=375, width=500, noise=18, num_files=1024),
    "photos": Kind(height=1024, width=1280, noise=6, num_files=512, without=frozenset({"numapin"})),
}


def write_files(folder: Path, kind: Kind) -> list[str]:
    """Write JPEG files, and return their paths."""

    def write(number: int) -> str:
        random = np.random.default_rng(number)
        height, width = (int(side * random.uniform(0.9, 1.1)) for side in (kind.height, kind.width))
        coarse = random.integers(0, 256, (height // 24, width // 24, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32)
        noisy = smooth + kind.noise * random.standard_normal((height, width, 3), np.float32)
        path = folder / f"{number:05}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        return str(path)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(write, range(kind.num_files)))


def guide(**names: object) -> dict[str, Any]:
    """Return what the guide's code defines, given its `paths`, `labels` and `device`."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), GUIDE, "exec"), names)  # noqa: S102 - what is measured is what the guide shows
    return names


class Usual(Dataset[Any]):
    """Images as torch's tutorials load them."""

    def __init__(self, paths: list[str], labels: list[int]) -> None:
        self.paths, self.labels = paths, labels
        crop = (transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor())
        self.change = transforms.Compose([*crop, transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - a tensor and a class
        """Return an image and its class."""
        with Image.open(self.paths[index]) as image:
            return self.change(image.convert("RGB")), self.labels[index]


def pipelines_of(paths: list[str], device: torch.device, num_workers: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return what starts each pipeline's epoch, which is longer than any run."""
    paths = paths * (_NUM_SAMPLES // len(paths))
    labels = [number % 1000 for number in range(len(paths))]
    ours = guide(paths=paths, labels=labels, device=device)
    images = torch.randn(BATCH, 3, 224, 224, device=device)
    ceiling = images, torch.arange(BATCH, device=device)
    usual: Any = DataLoader(
        Usual(paths, labels), BATCH, shuffle=True, num_workers=num_workers, pin_memory=device.type == "cuda"
    )

    def moved() -> Iterable[Any]:
        return ([part.to(device, non_blocking=True) for part in batch] for batch in usual)

    return {
        "ceiling": lambda: repeat(ceiling),
        "torch": moved,
        "numapin": lambda: ours["loader"],
        "numapin, GPU decoder": lambda: ours["photos"],
    }


class Trainer:
    """ResNet-50 under bfloat16 autocast, or a small network for a smoke test."""

    def __init__(self, device: torch.device, *, is_small: bool) -> None:
        self.device = device
        layers = nn.Sequential(nn.Conv2d(3, 8, 7, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000))
        network = layers if is_small else resnet((3, 4, 6, 3), has_bottlenecks=True)
        self.network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.network(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def run(self, batches: Iterable[Any], num_first: int, num_timed: int) -> dict[str, float]:
        """Train for some steps, after the first ones; return the images per second, and the share of waiting."""
        iterator = iter(batches)
        for _ in range(num_first):
            self.step(*next(iterator))
        self._synchronize()
        began_s, waited_s = time.perf_counter(), 0.0
        for _ in range(num_timed):
            asked_s = time.perf_counter()
            images, labels = next(iterator)
            waited_s += time.perf_counter() - asked_s
            self.step(images, labels)
        self._synchronize()
        took_s = time.perf_counter() - began_s
        return {"images_per_s": num_timed * BATCH / took_s, "wait_share": waited_s / took_s}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(kind: str, trainer: Trainer, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return each pipeline's runs."""
    num_workers = len(os.sched_getaffinity(0))
    # The first steps take what the workers made while they started: prefetch_factor is 2.
    num_first, num_timed = (1, 1) if options.quick else (2 * num_workers, num_workers)
    names = [name for name in PIPELINES if name not in KINDS[kind].without]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), KINDS[kind])
        num_bytes = statistics.mean(Path(path).stat().st_size for path in paths)
        print(f"{kind}: {len(paths)} files of {num_bytes / 1e3:.0f} kB, {num_workers} workers", flush=True)
        pipelines = pipelines_of(paths, trainer.device, num_workers)
        for number in range(options.repeats):
            for name in names[:: -1 if number % 2 else 1]:
                run = trainer.run(pipelines[name](), num_first, num_timed)
                runs[name].append(run)
                shown = f"{run['images_per_s']:,.0f} images/s, {run['wait_share']:.0%} in next()"
                print(f"  {number} {name}: {shown}", flush=True)
    return runs


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Return a line for each pipeline: the median, its share of the ceiling, and its speed beside torch's."""
    lines = [f"{'':20} images/s  of the ceiling  in next()  times torch's (99 % interval)"]
    medians = {name: statistics.median(run["images_per_s"] for run in each) for name, each in runs.items()}
    for name, median in medians.items():
        waited = statistics.median(run["wait_share"] for run in runs[name])
        line = f"{name:20} {median:8,.0f} {median / medians['ceiling']:15.2f} {waited:10.0%}"
        times = [{n: 1 / run["images_per_s"] for n, run in enumerate(runs[which])} for which in ("torch", name)]
        verdict = None if name in ("ceiling", "torch") else faster(*times, margin=0.05)
        if verdict is not None:
            interval = "" if verdict.low is None else f" ({verdict.low:.2f} to {verdict.high:.2f})"
            line += f"  {verdict.ratio:.2f}{interval}, {verdict.verdict}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure each kind of files, print the tables, and write every run."""
    parser = argparse.ArgumentParser(prog="python -m bench.images", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each pipeline; a verdict needs 5 (default: 5)")
    parser.add_argument("--quick", action="store_true", help="smoke test: a small network, few batches")
    parser.add_argument("--json", type=Path, help="file for every run")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(device, is_small=options.quick)
    runs = {kind: measure(kind, trainer, options) for kind in options.kinds}
    for kind, each in runs.items():
        print(f"\n{kind}\n{table(each)}")
    if options.json is not None:
        report = {"machine": read_machine().to_json(), "pipelines": PIPELINES, "runs": runs}
        write_text_to(str(options.json), json.dumps(report, indent=1) + "\n", remedy="choose another --json")


if __name__ == "__main__":
    main()
