"""The dataset of `bench loader`: 512 samples in memory, which tell in a batch where they came from.

Comes in: a `LoaderCase`. Goes out: samples by index modulo 512, and a check of the batches that a peer made of them.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import Dataset, default_collate

from numapin.bench.cases.loader import NUM_SAMPLES, LoaderCase, Work, spin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ENDLESS: Final = 1 << 30  # samples: more than any window takes
_NUM_CODES: Final = 128  # a sample's first and last element say its index modulo this; every dtype can
_NUM_IMAGES: Final = 8
_DTYPES: Final = {"float32": torch.float32, "int64": torch.int64, "uint8": torch.uint8}


class InMemory(Dataset[Any]):
    """Samples as the case wants them. Pickles as its arguments, so that a spawned worker makes its own."""

    def __init__(self, case: LoaderCase, gil_ns: int) -> None:
        self._case, self._gil_ns = case, gil_ns
        makers: dict[Work, Callable[[LoaderCase], Callable[[int], Any]]] = {Work.DECODE: _images}
        self._sample = makers.get(case.work, _dicts if case.num_tensors else _tensors)(case)

    def __reduce__(self) -> tuple[type[InMemory], tuple[LoaderCase, int]]:
        """Pickle the arguments only."""
        return InMemory, (self._case, self._gil_ns)

    def __len__(self) -> int:
        """Return a number that no run reaches."""
        return _ENDLESS

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - a tuple or a dict of tensors
        """Return a sample, after the work that the case asks for."""
        if self._gil_ns:
            spin(self._gil_ns)
        return self._sample(index % NUM_SAMPLES)


class Fetch:
    """Make a batch from a list of indices, as a DataLoader's worker does. Pickles as its dataset does."""

    def __init__(self, dataset: InMemory) -> None:
        self._dataset = dataset

    def __call__(self, indices: Sequence[int]) -> Any:  # noqa: ANN401 - a list or a dict of tensors
        """Collate the samples."""
        return default_collate([self._dataset[index] for index in indices])


def tensors(batch: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a tensor, or tuples, lists and dicts of them
    """Give all tensors of a batch in their order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors(part)


def num_bytes(batch: Any) -> int:  # noqa: ANN401 - as above
    """Return the bytes of all tensors of a batch."""
    return sum(tensor.nbytes for tensor in tensors(batch))


def require_intact(batch: Any, case: LoaderCase) -> None:  # noqa: ANN401 - as above
    """Raise ValueError unless every sample of the batch is whole: its first and last element are its code, and in all
    of its tensors, and in its label, it is the same sample.
    """  # noqa: D205 - one sentence
    parts = [tensor.cpu() for tensor in tensors(batch)]
    data = parts if case.num_tensors else parts[:1]
    codes = data[0].flatten(1)[:, 0] if case.num_tensors else parts[1] % _NUM_CODES
    for part in data:
        ends = part.flatten(1)[:, [0, -1]]
        if part.shape != (case.batch_size, *case.shape) or not bool((ends == codes[:, None]).all()):
            raise ValueError(f"a batch is not what the dataset gave: {tuple(part.shape)}, first elements {ends[:4]}")


def _codes(case: LoaderCase) -> torch.Tensor:
    return (torch.arange(NUM_SAMPLES) % _NUM_CODES).to(_DTYPES[case.dtype])


def _filled(case: LoaderCase, *shape: int) -> torch.Tensor:
    """Return all samples, each filled with its code."""
    return _codes(case).view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous()


def _tensors(case: LoaderCase) -> Callable[[int], Any]:
    data = _filled(case, *case.shape)
    return lambda index: (data[index], index)


def _dicts(case: LoaderCase) -> Callable[[int], Any]:
    names = [f"t{number:03}" for number in range(case.num_tensors or 0)]
    data = _filled(case, len(names), *case.shape)
    samples = [dict(zip(names, sample.unbind(), strict=True)) for sample in data]
    return samples.__getitem__


def _images(case: LoaderCase) -> Callable[[int], Any]:
    """Decode from noise that zlib halves, twice as high and wide as the sample."""
    channels, height, width = case.shape
    noise = torch.randint(
        0, 16, (_NUM_IMAGES, 2 * height, 2 * width, channels), dtype=torch.uint8, generator=torch.Generator()
    )
    packed = [zlib.compress(bytes(image.flatten().tolist()), level=1) for image in noise]

    def decode(index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.frombuffer(bytearray(zlib.decompress(packed[index % _NUM_IMAGES])), dtype=torch.uint8)
        planes = pixels.view(2 * height, 2 * width, channels).permute(2, 0, 1).float()
        image = torch.nn.functional.avg_pool2d(planes, 2).to(torch.uint8)
        image[0, 0, 0] = image[-1, -1, -1] = index % _NUM_CODES
        return image, index

    return decode
