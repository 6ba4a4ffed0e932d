"""A job that survives preemption: told to go, it saves everything at the next step and ends; started again, it goes on.

    numapin run --max-restarts 3 examples/train_checkpoint.py --checkpoint FILE     one rank per GPU, NCCL
    numapin run --max-restarts 3 --nproc-per-node 2 examples/train_checkpoint.py    two ranks; without GPUs gloo
    numapin run … --requeue 'scontrol requeue $SLURM_JOB_ID'                        in a Slurm job with --signal=USR1@60

Expect the loss to fall from 0.9 to 0.1. After SIGUSR1 or SIGTERM, to one rank or to all, a line says what was saved,
rank 0 runs the --requeue command, and all end with status 0. The same command then goes on; its last checkpoint is that
of a run that nobody disturbed, on CPUs to the bit. When a rank dies, --max-restarts goes on from the last whole epoch.
"""

import argparse
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

import numapin


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that goes on after the samples that all ranks together have seen, over all epochs."""

    seen = 0

    def __iter__(self) -> Iterator[int]:
        epoch, seen = divmod(self.seen, self.total_size)
        self.set_epoch(epoch)
        return iter([*super().__iter__()][seen // self.num_replicas :])


def save(path: Path, net: nn.Module, optimizer: optim.Optimizer, sampler: ResumableSampler) -> None:
    """Write a checkpoint that is there as a whole or not at all, even if the machine goes down meanwhile."""
    rngs = [None] * dist.get_world_size()
    dist.all_gather_object(rngs, (torch.get_rng_state(), torch.cuda.get_rng_state_all()))
    if dist.get_rank() == 0:
        with (new := path.with_name(f"{path.name}.new")).open("wb") as file:
            torch.save((net.state_dict(), optimizer.state_dict(), sampler.seen, rngs), file)
            os.fsync(file.fileno())
        new.replace(path)


def main() -> None:
    """Train for some epochs, from the checkpoint if there is one."""
    told = []  # loader workers inherit the handler: a signal to all processes of the job leaves them at work
    signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--requeue", default="true", metavar="COMMAND")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    labels, centres = torch.arange(4096) % 8, torch.randn(8, 64)
    dataset = TensorDataset(centres[labels] + 2 * torch.randn(4096, 64), labels)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 8)).to(device)
    model, optimizer = DistributedDataParallel(net), optim.AdamW(net.parameters(), lr=1e-3)
    sampler, own = ResumableSampler(dataset), torch.Generator()  # a loader without its own draws from torch's
    loader = numapin.DataLoader(dataset, 64, sampler=sampler, num_workers=1, device=device, generator=own)
    if arguments.checkpoint.exists():
        net_state, optimizer_state, sampler.seen, rngs = torch.load(arguments.checkpoint, map_location="cpu")
        net.load_state_dict(net_state)
        optimizer.load_state_dict(optimizer_state)
        if len(rngs) == dist.get_world_size():  # else there are more or fewer ranks now: new random numbers
            torch.set_rng_state(rngs[dist.get_rank()][0])
            torch.cuda.set_rng_state_all(rngs[dist.get_rank()][1])

    stop = torch.tensor(0)  # on the CPU, for gloo: asking whether to stop does not wait for the GPU
    while not stop and sampler.seen < arguments.epochs * sampler.total_size:
        for points, wanted in loader:
            loss = nn.functional.cross_entropy(model(points), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sampler.seen += len(points) * dist.get_world_size()
            dist.all_reduce(stop.fill_(len(told)))
            if stop:
                break
        save(arguments.checkpoint, net, optimizer, sampler)
        if dist.get_rank() == 0:
            print(f"epoch {sampler.seen / sampler.total_size:.2f}: loss {loss.item():.4f}, saved", flush=True)
    if stop and dist.get_rank() == 0:
        subprocess.run(arguments.requeue, shell=True, check=True)  # noqa: S602
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
