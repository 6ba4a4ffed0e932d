"""FSDP2 (torch.distributed.fsdp.fully_shard): a small transformer whose parameters are sharded over the ranks.

    numapin run examples/train_fsdp.py                       one rank per GPU, NCCL, bfloat16
    numapin run --nproc-per-node 2 examples/train_fsdp.py    two ranks; without GPUs on the CPU, gloo, float32
    numapin run examples/train_fsdp.py --cpu-offload --width 2048    parameters and AdamW in host memory

Expect the share of the parameters that rank 0 holds (half of them with two ranks), then one line per epoch, with a loss
that falls from about 1.7 to below 0.1. Sequences count up by ones or twos, modulo 32; the model predicts the next one.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.data import Dataset, DistributedSampler

import numapin

NUM_TOKENS, LENGTH = 32, 16


class Counting(Dataset):
    """Sequences of LENGTH + 1 numbers; sequence n is always the same."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> torch.Tensor:
        start = torch.randint(NUM_TOKENS, (1,), generator=torch.Generator().manual_seed(index))
        step = 1 + index % 2
        return (start + step * torch.arange(LENGTH + 1)) % NUM_TOKENS


class Transformer(nn.Module):
    """Two blocks of PyTorch's own layers, with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(NUM_TOKENS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next number at every position."""
        hidden = self.token(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=hidden.device, dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))  # one row per position of each sequence


def main() -> None:
    """Shard, train for a few epochs and print the mean loss of each on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--cpu-offload", action="store_true")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    model = Transformer(arguments.width).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if arguments.cpu_offload else OffloadPolicy()
    for module in (*model.blocks, model):  # blocks are gathered when they run, and freed afterwards
        fully_shard(module, mp_policy=policy, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding, so that its state is sharded too
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"rank 0 holds {held / sum(p.numel() for p in model.parameters()):.1%} of the parameters", flush=True)
    dataset = Counting()
    sampler = DistributedSampler(dataset)
    loader = numapin.DataLoader(dataset, 64, sampler=sampler, num_workers=1, device=device)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for tokens in loader:
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
