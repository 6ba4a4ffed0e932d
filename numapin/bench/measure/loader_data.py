"""The dataset of `bench loader`: 512 samples in memory, which can be recognized in a batch."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.utils.data import Dataset

from numapin.bench.cases.loader import NUM_SAMPLES, LoaderCase, Work, spin
from numapin.data.buffer import batch_buffer
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ENDLESS: Final = 1 << 30  # samples; more than any window takes
_NUM_CODES: Final = 128  # a sample's first and last element are its index modulo this, which fits every dtype
_NUM_IMAGES: Final = 8
_SHORTEST: Final = 64  # elements of a sequence
_DTYPES: Final = {"float32": torch.float32, "int64": torch.int64, "uint8": torch.uint8}


Sample: TypeAlias = tuple[torch.Tensor, int] | dict[str, torch.Tensor]
Batch: TypeAlias = "torch.Tensor | dict[str, Batch] | list[Batch] | tuple[Batch, ...]"


class InMemory(Dataset[Sample]):
    """The samples of a case. It is pickled as its arguments, so that a spawned worker makes its own."""

    def __init__(self, case: LoaderCase, gil_ns: int) -> None:
        self.case, self._gil_ns = case, gil_ns
        self._sample = _MAKERS.get(case.work, _dicts if case.num_tensors else _tensors)(case)

    def __reduce__(self) -> tuple[type[InMemory], tuple[LoaderCase, int]]:
        """Pickle only the arguments."""
        return InMemory, (self.case, self._gil_ns)

    def __len__(self) -> int:
        """Return more samples than any run takes."""
        return _ENDLESS

    def __getitem__(self, index: int) -> Sample:
        """Return a sample, after the case's work."""
        self.work()
        return self._sample(index % NUM_SAMPLES)

    def work(self) -> None:
        """Do the work of a sample that holds the GIL."""
        if self._gil_ns:
            spin(self._gil_ns)


class Written(Dataset["Batch"]):
    """Batches of a case that are written into `numapin.batch_buffer`, as by a decoder: no samples are read.

    Every sample is the same one, which stays in the caches, apart from its first and last element.
    """

    def __init__(self, samples: InMemory, *, passes_caches: bool) -> None:
        self._samples, self._passes_caches = samples, passes_caches
        self._sample = torch.ones(samples.case.shape, dtype=_DTYPES[samples.case.dtype])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        """Write a batch."""
        batch = batch_buffer((len(indices), *self._sample.shape), self._sample.dtype)
        if self._passes_caches:
            blocks = [self._sample.data_ptr()] * len(indices)
            memory.stack_past_caches(batch.data_ptr(), blocks, self._sample.nbytes)
        else:
            for out in batch.unbind():
                out.copy_(self._sample)
        for _ in indices:
            self._samples.work()
        labels = torch.tensor(indices)
        batch.view(len(indices), -1)[:, [0, -1]] = (labels % _NUM_CODES).to(batch.dtype)[:, None]
        return batch, labels


def collate_of(case: LoaderCase) -> Callable[[list[Any]], Batch] | None:
    """Return the case's collate_fn, or None if it is the default."""
    return _padded if case.work is Work.PAD else None


def _padded(samples: list[dict[str, torch.Tensor]]) -> Batch:
    """Return a batch of sequences, each padded with zeros to the length of the longest."""
    return {
        name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True)
        for name in samples[0]
    }


def tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield all tensors of a batch in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors(part)


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return the batch with every tensor changed; tuples become lists."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(part, change) for name, part in batch.items()}
    return [map_tensors(part, change) for part in batch]


def num_bytes(batch: Batch) -> int:
    """Return the bytes of all tensors of a batch."""
    return sum(tensor.nbytes for tensor in tensors(batch))


def require_intact(batch: Batch, case: LoaderCase) -> None:
    """Require every sample to be intact: its first and last element are its code, equal in all of its tensors.

    Raises:
        ValueError: A sample is not what the dataset returned.
    """
    parts = [tensor.cpu() for tensor in tensors(batch)]
    if case.work is Work.PAD:
        _require_padded(parts, case)
        return
    if case.num_tensors:
        data, codes = parts, parts[0].flatten(1)[:, 0]
    else:
        data, codes = parts[:1], parts[1] % _NUM_CODES  # the label is the index
    for part in data:
        ends = part.flatten(1)[:, [0, -1]]
        if part.shape != (case.batch_size, *case.shape) or not bool((ends == codes[:, None]).all()):
            raise ValueError(f"a batch differs from the dataset: {tuple(part.shape)}, first elements {ends[:4]}")


def _require_padded(parts: Sequence[torch.Tensor], case: LoaderCase) -> None:
    """Require different samples, in rows that are padded as the samples of these numbers are."""
    numbers = [int(value) - 1 for value in parts[0][:, 0]]
    is_whole = len(set(numbers)) == case.batch_size and 0 <= min(numbers) <= max(numbers) < NUM_SAMPLES
    wanted = list(tensors(_padded([*map(_sequences(case), numbers)]))) if is_whole else []
    if len(parts) != len(wanted) or not all(map(torch.equal, parts, wanted)):
        raise ValueError(f"a batch differs from the dataset: {tuple(parts[0].shape)}, samples {numbers[:4]}")


def _codes(case: LoaderCase) -> torch.Tensor:
    return (torch.arange(NUM_SAMPLES) % _NUM_CODES).to(_DTYPES[case.dtype])


def _filled(case: LoaderCase, *shape: int) -> torch.Tensor:
    """Return all samples, each filled with its code."""
    return _codes(case).view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous()


def _tensors(case: LoaderCase) -> Callable[[int], Sample]:
    data = _filled(case, *case.shape)
    return lambda index: (data[index], index)


def _dicts(case: LoaderCase) -> Callable[[int], Sample]:
    names = [f"t{number:03}" for number in range(case.num_tensors or 0)]
    data = _filled(case, len(names), *case.shape)
    samples = [dict(zip(names, sample.unbind(), strict=True)) for sample in data]
    return samples.__getitem__


def _sequences(case: LoaderCase) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return dicts of sequences of one length, filled with the sample's number plus one.

    The lengths are spread evenly, and neighbors differ widely.
    """
    (longest,) = case.shape
    names = [f"t{number}" for number in range(case.num_tensors or 0)]
    lengths = [_SHORTEST + index * 377 % (longest + 1 - _SHORTEST) for index in range(NUM_SAMPLES)]
    samples = [
        {name: torch.full((length,), 1 + index, dtype=_DTYPES[case.dtype]) for name in names}
        for index, length in enumerate(lengths)
    ]
    return samples.__getitem__


def _images(case: LoaderCase) -> Callable[[int], Sample]:
    """Return samples decoded from compressed noise, which is twice as high and wide as the sample."""
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


_MAKERS: Final = {Work.DECODE: _images, Work.PAD: _sequences}
