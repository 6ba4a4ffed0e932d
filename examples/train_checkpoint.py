"""A job that survives preemption: on a signal it saves at the next step and exits; started again, it continues.

    numapin run --max-restarts 3 examples/train_checkpoint.py --checkpoint FILE     one rank per GPU, NCCL
    numapin run --max-restarts 3 --nproc-per-node 2 examples/train_checkpoint.py    two ranks; without GPUs gloo
    numapin run … --requeue 'scontrol requeue $SLURM_JOB_ID'                        in Slurm, if its script does not

Expect the loss to fall from 0.9 to 0.1. On SIGUSR1 or SIGTERM to any rank, the job saves, rank 0 runs --requeue, and
all ranks exit with status 0. The same command then continues in the middle of the epoch, by the loader's state, and on
CPUs ends with bitwise the same result. If a rank dies, all restart from the last complete epoch. With another number of
ranks the epoch begins again. FILE must outlive rank 0's machine: put it in a shared folder. The loader needs torchdata.
"""

import argparse
import os
import signal
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DistributedSampler, TensorDataset

import numapin


def save(path: Path, net: nn.Module, optimizer: optim.Optimizer, seen: int, loader: numapin.StatefulDataLoader) -> None:
    """Write a checkpoint completely or not at all, even if the machine crashes. It has each rank's own states."""
    rng = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    dist.all_gather_object(own := [None] * dist.get_world_size(), (rng, loader.state_dict()))
    if dist.get_rank() == 0:
        with (new := path.with_name(f"{path.name}.new")).open("wb") as file:
            torch.save((net.state_dict(), optimizer.state_dict(), seen, own), file)
            os.fsync(file.fileno())
        new.replace(path)


def main() -> None:
    """Train for a few epochs, from the checkpoint if there is one."""
    received = []  # handled, because srun signals every process, and loader workers must continue
    for preempted in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(preempted, lambda number, _: received.append(number))
    parser = argparse.ArgumentParser()
    for name, default in ("--epochs", 8), ("--checkpoint", Path("checkpoint.pt")), ("--requeue", "true"):
        parser.add_argument(name, type=type(default), default=default)
    arguments = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(8, 64).repeat(512, 1) + 2 * torch.randn(4096, 64), torch.arange(8).repeat(512))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 8)).to(device)
    optimizer, sampler = optim.AdamW(net.parameters(), lr=1e-3), DistributedSampler(dataset)
    # Forked workers inherit the handlers. Without its own generator, a loader would draw from torch's.
    options = {"num_workers": 1, "multiprocessing_context": "fork", "generator": torch.Generator()}
    loader = numapin.StatefulDataLoader(dataset, 64, sampler=sampler, device=device, **options)
    seen = 0  # by all ranks together, over all epochs
    is_there = dist.get_rank() == 0 and arguments.checkpoint.exists()  # other ranks may see another file, or none
    found = [torch.load(arguments.checkpoint, map_location="cpu") if is_there else None]
    dist.broadcast_object_list(found)
    if found[0]:
        net_state, optimizer_state, seen, own = found[0]
        net.load_state_dict(net_state)
        optimizer.load_state_dict(optimizer_state)
        if len(own) == dist.get_world_size():
            rng, place = own[dist.get_rank()]
            for put, state in zip((torch.set_rng_state, torch.cuda.set_rng_state), rng, strict=False):
                put(state)
            if seen % sampler.total_size:
                loader.load_state_dict(place)
        else:  # other shares: this epoch, and the random numbers, start anew
            seen -= seen % sampler.total_size
    model = nn.parallel.DistributedDataParallel(net)
    stop = torch.tensor(0)  # on the CPU, for gloo: reading it does not wait for the GPU
    while not stop and seen < arguments.epochs * sampler.total_size:
        sampler.set_epoch(seen // sampler.total_size)
        for points, wanted in loader:
            (loss := nn.functional.cross_entropy(model(points), wanted)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += len(points) * dist.get_world_size()
            dist.all_reduce(stop.fill_(len(received)))
            if stop:
                break
        save(arguments.checkpoint, net, optimizer, seen, loader)
        if dist.get_rank() == 0:
            print(f"epoch {seen / sampler.total_size:.2f}: loss {loss.item():.4f}, saved", flush=True)
    if stop and dist.get_rank() == 0:
        subprocess.run(arguments.requeue, shell=True, check=True)  # noqa: S602


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after the model is gone, which uses the group to its end
