"""The datasets of `bench train`: float32 samples and token sequences in memory, JPEG files in a folder. Edge.

Comes in: a `TrainCase`. Goes out: samples by index modulo their number, how to collate them, and a check of batches.
Workers inherit the datasets by fork. A sample has its number in it, so that a batch is checked in any order.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.utils.data import Dataset, default_collate

from numapin.bench.cases.train import NUM_IMAGES, Material

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.bench.cases.train import TrainCase

_ENDLESS: Final = 1 << 30  # samples, so that no epoch ends within a measurement
_NUM_CODES: Final = 128  # the first element of a float32 sample is its number modulo this
_SIDES: Final = (375, 500)  # height and width of an image, as most photos of ImageNet
_QUALITY: Final = 90
_SHORTEST: Final = 1 / 16  # the shortest sequence, relative to the longest
IGNORED: Final = -100  # torch's cross-entropy leaves out these targets
_NUM_CHECKED: Final = 2  # samples at each end of a batch

TrainBatch: TypeAlias = "list[torch.Tensor] | dict[str, torch.Tensor]"


class TrainSet(Dataset[Any]):
    """The samples of a case for one rank."""

    def __init__(self, case: TrainCase, *, seed: int, folder: str) -> None:
        self.case, self.folder = case, folder
        generator = torch.Generator().manual_seed(seed)
        self._sample: Callable[[int], Any]
        match case.material:
            case Material.FLOATS:
                self._sample = _floats(case, generator)
            case Material.TOKENS:
                self._sample = _tokens(case, generator)
            case Material.JPEG:
                self._sample = _jpegs(case, folder)

    @property
    def collate(self) -> Callable[[Sequence[Any]], TrainBatch]:
        """The function that makes a batch of samples; it can be pickled."""
        collate: Callable[[Any], Any] = pad if self.case.material is Material.TOKENS else default_collate
        return collate

    def __len__(self) -> int:
        """Return more samples than any measurement takes."""
        return _ENDLESS

    def __getitem__(self, index: int) -> Any:
        """Return a sample: a tensor with its number, or a sequence that begins with it."""
        return self._sample(index % self.case.num_samples)

    def batch(self, number: int) -> TrainBatch:
        """Return a batch as a loader makes it, in this process."""
        first = number * self.case.batch_size
        return self.collate([self[index] for index in range(first, first + self.case.batch_size)])

    def require_intact(self, batch: TrainBatch) -> None:
        """Require the first and last samples of a batch to match the dataset.

        Raises:
            ValueError: They are not.
        """
        size = self.case.batch_size
        self.require_shape(batch)
        check = _is_sequence if isinstance(batch, dict) else _is_image
        rows = sorted({*range(min(_NUM_CHECKED, size)), *range(max(0, size - _NUM_CHECKED), size)})
        if not all(check(self, batch, row) for row in rows):
            raise ValueError(f"{self.case.name}: a batch differs from the dataset")

    def require_shape(self, batch: TrainBatch) -> None:
        """Require a batch of the case's size and, unless it is padded, of its shape. Raises ValueError."""
        shape, case = tuple(parts(batch)[0].shape), self.case
        if shape[0] != case.batch_size or (case.material is not Material.TOKENS and shape[1:] != case.shape):
            raise ValueError(f"{case.name}: a batch differs from the dataset: it has the shape {shape}")


def parts(batch: TrainBatch) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return list(batch.values() if isinstance(batch, dict) else batch)


def map_parts(batch: TrainBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainBatch:
    """Return the batch with every tensor changed."""
    if isinstance(batch, dict):
        return {name: change(part) for name, part in batch.items()}
    return [change(part) for part in batch]


def to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """Copy a batch to the device, asynchronously if it is pinned."""
    return map_parts(batch, lambda part: part.to(device, non_blocking=True))


def inputs_and_targets(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a model."""
    if isinstance(batch, dict):
        return batch["input_ids"], batch["labels"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    images, numbers = batch
    return images, numbers


def pad(sequences: Sequence[torch.Tensor]) -> TrainBatch:
    """Pad sequences to the longest one. The target of each position is the next token."""
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None] - 1).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.roll(-1, 1)}


def make_images(folder: Path) -> None:
    """Write the JPEG files: smooth colors with noise, which take about as long to decode as photos."""
    generator = torch.Generator().manual_seed(0)
    for number in range(NUM_IMAGES):
        coarse = torch.rand(1, 3, 12, 16, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, size=_SIDES, mode="bicubic")[0]
        noisy = smooth + 0.05 * torch.randn(smooth.shape, generator=generator)
        pixels = (noisy.clamp(0, 1) * 255).to(torch.uint8)
        _write_jpeg(pixels, folder / f"{number}.jpg")


def _write_jpeg(pixels: torch.Tensor, path: Path) -> None:
    if find_spec("PIL") is None:
        import_module("torchvision.io").write_jpeg(pixels, str(path), quality=_QUALITY)
        return
    size = (pixels.shape[2], pixels.shape[1])
    packed = bytearray(pixels.numel())
    torch.frombuffer(packed, dtype=torch.uint8).copy_(pixels.permute(1, 2, 0).flatten())
    import_module("PIL.Image").frombytes("RGB", size, bytes(packed)).save(path, quality=_QUALITY)


def _decoder() -> Callable[[Path], torch.Tensor]:
    """Return torchvision's decoder if it is installed, else Pillow's: a path becomes 3 x height x width."""
    if find_spec("torchvision") is None:
        return _decode_with_pillow
    return _decode_with_torchvision


def _decode_with_torchvision(path: Path) -> torch.Tensor:
    io = import_module("torchvision.io")
    pixels: torch.Tensor = io.decode_jpeg(io.read_file(str(path)), mode=io.ImageReadMode.RGB)
    return pixels


def _decode_with_pillow(path: Path) -> torch.Tensor:
    with import_module("PIL.Image").open(path) as image:
        pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def _floats(case: TrainCase, generator: torch.Generator) -> Callable[[int], tuple[torch.Tensor, int]]:
    """Return views of random samples, which cost a worker nothing."""
    samples = torch.randn(case.num_samples, *case.shape, generator=generator)
    samples.flatten(1)[:, 0] = (torch.arange(case.num_samples) % _NUM_CODES).float()
    return lambda number: (samples[number], number)


def _tokens(case: TrainCase, generator: torch.Generator) -> Callable[[int], torch.Tensor]:
    """Return sequences of lengths from a sixteenth of the longest to the longest, most of them short."""
    (longest,) = case.shape
    shares = torch.rand(case.num_samples, generator=generator) ** 2
    lengths = (longest * (_SHORTEST + (1 - _SHORTEST) * shares)).long().clamp(min=2)
    sequences = [torch.randint(0, case.num_classes, (int(length),), generator=generator) for length in lengths]
    for number, sequence in enumerate(sequences):
        sequence[0] = number
    return sequences.__getitem__


def _jpegs(case: TrainCase, folder: str) -> Callable[[int], tuple[torch.Tensor, int]]:
    """Return images that are read, decoded and cropped each time."""
    paths = [Path(folder, f"{number}.jpg") for number in range(NUM_IMAGES)]
    decode, (_, height, width) = _decoder(), case.shape

    def sample(number: int) -> tuple[torch.Tensor, int]:
        image = decode(paths[number % NUM_IMAGES])
        top, left = (image.shape[1] - height) // 2, (image.shape[2] - width) // 2
        return image[:, top : top + height, left : left + width].contiguous(), number

    return sample


def _is_image(samples: TrainSet, batch: Any, row: int) -> bool:
    image, number = batch[0][row].cpu(), int(batch[1][row])
    return 0 <= number < samples.case.num_samples and torch.equal(image, samples[number][0])


def _is_sequence(samples: TrainSet, batch: Any, row: int) -> bool:
    ids, mask = batch["input_ids"][row].cpu(), batch["attention_mask"][row].cpu()
    number = int(ids[0])
    if not 0 <= number < samples.case.num_samples:
        return False
    sequence = samples[number]
    rest = ids[len(sequence) :]
    return torch.equal(ids[: len(sequence)], sequence) and not rest.any() and int(mask.sum()) == len(sequence) - 1
