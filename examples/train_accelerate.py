"""Hugging Face Accelerate: `numapin run` replaces `accelerate launch`, and the loader stays numapin's.

    numapin run examples/train_accelerate.py                       one rank per GPU, NCCL
    numapin run --nproc-per-node 2 examples/train_accelerate.py    two ranks; without GPUs on the CPU, gloo

Expect one line that reports numapin's data path (Accelerate's `prepare` copies the loader, and the copy keeps
it), and one line per epoch, with a loss that falls from about 1.7 to 0.3. Needs `pip install accelerate`. Each sample
is noise around the center of its class.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import Dataset

import numapin


class Clusters(Dataset):
    """Points in 64 dimensions around one of eight centers; point n is always the same."""

    def __init__(self) -> None:
        self.centers = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return self.centers[index % 8] + 2 * noise, index % 8


def train(accelerator: Accelerator, epochs: int) -> None:
    """Train, and print the mean loss of each epoch on the main process."""
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    loader = numapin.DataLoader(Clusters(), 64, shuffle=True, num_workers=1, device=accelerator.device)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), loader)

    for epoch in range(epochs):
        losses = []
        for points, labels in loader:  # Accelerate gives each rank its share of the batches
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)
    accelerator.free_memory()


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    train(accelerator, arguments.epochs)
    accelerator.end_training()  # after the model is gone: it uses the group until then


if __name__ == "__main__":
    main()
