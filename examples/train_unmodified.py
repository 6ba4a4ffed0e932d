"""An ordinary training script with torch's DataLoader and torchrun's variables, which does not import numapin.

    torchrun --nproc-per-node 2 train_unmodified.py                             as its authors intended
    numapin run --nproc-per-node 2 --dataloader=numapin train_unmodified.py     bound, with numapin's data path

Expect the loss to fall from about 0.43 to below 0.01 with either command. The second one also prints one line that
reports numapin's data path under torch's DataLoader. Leave out --nproc-per-node for one rank per GPU. The model
learns to distinguish a noisy sine from a noisy square wave.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    """256 points of a sine (0) or square wave (1), with random frequency and phase."""

    def __init__(self, size: int = 2048) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chance = random.Random(index)  # noqa: S311
        time = torch.linspace(0, chance.uniform(10, 40), 256) + chance.uniform(0, 6.28)
        wave = time.sin().sign() if index % 2 else 1.2 * time.sin()
        noise = torch.randn(256, generator=torch.Generator().manual_seed(index))
        return {"wave": wave + 0.1 * noise, "label": torch.tensor(index % 2)}


def get_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def train_one_epoch(
    model: nn.Module, loader: DataLoader, optimizer: optim.Optimizer, device: torch.device
) -> torch.Tensor:
    """Train for one epoch and return the mean loss of this rank."""
    total = torch.zeros((), device=device)
    for batch in loader:
        wave, label = batch["wave"].to(device, non_blocking=True), batch["label"].to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(wave.unsqueeze(1)), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(loader)


def main(args: argparse.Namespace) -> None:
    """Set up and train."""
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)

    dataset = Waves()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=args.workers > 0,
    )
    model = nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 16, 9), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten()
    )
    model = nn.parallel.DistributedDataParallel(nn.Sequential(model, nn.Linear(16, 2)).to(device))
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, device)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item() / dist.get_world_size():.4f}", flush=True)


if __name__ == "__main__":
    main(get_args())
    dist.destroy_process_group()  # after the model is gone, which uses the group to its end
