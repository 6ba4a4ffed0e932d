"""A training script for the tests of `numapin trace` on GPUs. CASE selects how batches get to the GPU. Not a test."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, Dataset

import numapin


class Batches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64, 3, 224, 224), float(index))


def main(case: str) -> None:
    """Train 80 steps; the compute of a step takes a few milliseconds longer than its copy."""
    dataset, device = Batches(), torch.device("cuda")
    loader = (
        numapin.DataLoader(dataset, batch_size=None, num_workers=6, device="cuda")
        if case == "device"
        else DataLoader(dataset, batch_size=None, num_workers=6, pin_memory=case != "pageable")
    )
    weight = torch.nn.Parameter(torch.ones(4096, 4096, device=device))
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    for batch in loader:
        moved = batch.to(device, non_blocking=case == "asynchronous")
        product = torch.mm(weight, weight)
        for _ in range(2):
            product = torch.mm(weight, product)
        (product.sum() * 1e-9 + moved.sum() * 1e-9).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
