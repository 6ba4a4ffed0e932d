"""Plain DistributedDataParallel: a convolutional net on synthetic images that numapin.DataLoader copies to the GPU.

    numapin run examples/train_ddp.py                        one rank per GPU, NCCL
    numapin run --nproc-per-node 2 examples/train_ddp.py     two ranks; without GPUs on the CPU, gloo

Expect one line per epoch, with a loss that falls from about 1.15 to below 0.01. The only difference from a script for
torchrun is the loader: its batches are already on `device`, copied during the previous step. torchrun can run this
script too, unbound. Each image is noise with one bright quadrant, which is the label.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

import numapin


class Quadrants(Dataset):
    """Images of 3 x 32 x 32; image n is the same in every process."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        row, column = divmod(index % 4, 2)
        noise[:, row * 16 : row * 16 + 16, column * 16 : column * 16 + 16] += 0.5
        return noise, index % 4


def make_net() -> nn.Module:
    """Return a small convolutional net."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    net(torch.zeros(1, 3, 32, 32))  # gives the lazy layer its size
    return net


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
    model = DistributedDataParallel(make_net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = Quadrants()
    sampler = DistributedSampler(dataset)
    loader = numapin.DataLoader(dataset, 64, sampler=sampler, num_workers=1, device=device)

    losses = []
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / len(loader) / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"loss went from {losses[0]:.4f} to {losses[-1]:.4f} on {dist.get_world_size()} ranks ({device.type})")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after the model is gone, which uses the group to its end
