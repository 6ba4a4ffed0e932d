"""Batches from a memory-mapped array: each row is copied once, from the file's pages to where the GPU reads it.

    numapin run examples/train_memmap.py                        one rank per GPU, NCCL
    numapin run --nproc-per-node 2 examples/train_memmap.py     two ranks; without GPUs on the CPU, gloo

Expect one line per epoch, with a loss that falls from about 0.15 to below 0.01. The dataset gets the indices of a whole
batch (`batch_size=None` and a BatchSampler), asks `numapin.batch_buffer` for memory, and has numpy write there.
"""

import argparse
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

import numapin


class Rows(Dataset):
    """Rows of an array in a file; an item is a batch."""

    def __init__(self, path: str) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = numapin.batch_buffer((len(indices), *self.rows.shape[1:]), torch.float32)
        # Without mode="clip" numpy checks the indices after it has written to a copy of `out`.
        np.take(self.rows, indices, axis=0, out=batch.numpy(), mode="clip")
        return batch, torch.tensor(indices) % 4


def write_rows(path: str) -> None:
    """Write 8192 rows of noise; quarter n % 4 of row n is larger."""
    rows = np.random.default_rng(0).standard_normal((8192, 4, 256), dtype=np.float32)
    rows[np.arange(8192), np.arange(8192) % 4] += 0.5
    np.save(path, rows)


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
    net = nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        write_rows(f"{folder}/rows.npy")
        dataset = Rows(f"{folder}/rows.npy")
        sampler = DistributedSampler(dataset)
        batches = BatchSampler(sampler, 64, drop_last=True)
        loader = numapin.DataLoader(dataset, batch_size=None, sampler=batches, num_workers=1, device=device)
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(1, device=device)
            for rows, labels in loader:
                loss = nn.functional.cross_entropy(model(rows), labels)
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
