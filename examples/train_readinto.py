"""Batches from a decoder that has an output argument: it writes each sample to where the GPU reads it.

    numapin run examples/train_readinto.py                        one rank per GPU, NCCL
    numapin run --nproc-per-node 2 examples/train_readinto.py     two ranks; without GPUs on the CPU, gloo

Expect one line per epoch, with a loss that falls from about 0.5 to below 0.01. The "decoder" is `readinto`, which reads
a file of raw pixels; cv2.imdecode and PyTurboJPEG take an output array (`dst=`) as well. The dataset's `__getitems__`
makes a whole batch, and the collate_fn leaves it as it is.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

import numapin

SHAPE = (3, 32, 32)


class Files(Dataset):
    """Images of one byte a pixel in a file each; quadrant n % 4 of image n is brighter."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images = numapin.batch_buffer((len(indices), *SHAPE), torch.uint8)
        for image, index in zip(images, indices, strict=True):
            with self.paths[index].open("rb", buffering=0) as file:
                if file.readinto(image.numpy()) != image.nbytes:
                    raise ValueError(f"{self.paths[index]} is too short")
        return images, torch.tensor(indices) % 4


def leave(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch: `__getitems__` has collated it."""
    return batch


def write_files(folder: Path) -> None:
    """Write 2048 images."""
    images = np.random.default_rng(0).integers(0, 192, (2048, *SHAPE), dtype=np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number % 4, 2)
        image[:, row * 16 : row * 16 + 16, column * 16 : column * 16 + 16] += 63
        (folder / f"{number:04}").write_bytes(image.tobytes())


def main() -> None:
    """Train for a few epochs and print the mean loss of each on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        dataset = Files(Path(folder))
        sampler = DistributedSampler(dataset)
        loader = numapin.DataLoader(dataset, 64, sampler=sampler, num_workers=1, collate_fn=leave, device=device)
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(1, device=device)
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images.float() / 128 - 1), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after the model is gone, which uses the group to its end
