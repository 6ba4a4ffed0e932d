"""A model of `bench train` in a rank: its network, optimizer and samples, and one training step. Edge.

Comes in: a `TrainCase` and the rank's device. Goes out: a `Trainer`, the same for every loader of the case.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from numapin.bench.measure.train_data import TrainSet, inputs_and_targets, to_device
from numapin.bench.measure.train_models import Lossy
from numapin.bench.measure.train_usage import cpus_per_rank

if TYPE_CHECKING:
    from torch import nn

    from numapin.bench.cases.train import TrainCase
    from numapin.bench.measure.train_data import TrainBatch

_NUM_FIRST_STEPS: Final = 3  # cuDNN chooses its algorithms, FSDP allocates


class Trainer:
    """A network on this rank's device, with its samples. It has made its first steps, which take longer."""

    def __init__(self, case: TrainCase, device: torch.device, *, folder: str) -> None:
        self.case, self.device = case, device
        self.samples = TrainSet(case, seed=dist.get_rank(), folder=folder)
        torch.manual_seed(0)
        network = Lossy(case)
        torch.set_num_threads(_num_threads(case, device))
        if case.is_offloaded:
            self._model = _sharded(network, device)
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        else:
            self._model = _replicated(network.to(device), case, device)
            self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(_NUM_FIRST_STEPS):
            self.step(self.batches[0])

    @cached_property
    def batches(self) -> list[TrainBatch]:
        """All distinct batches, on the device."""
        return [to_device(self.samples.batch(number), self.device) for number in range(self.case.num_distinct)]

    def step(self, batch: TrainBatch) -> None:
        """Train on one batch."""
        inputs, targets = inputs_and_targets(batch)
        if self.case.channels_last:
            inputs = inputs.to(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.case.bf16):
            loss = self._model(inputs, targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def _replicated(network: nn.Module, case: TrainCase, device: torch.device) -> nn.Module:
    if case.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's types lack it
    return DistributedDataParallel(network, device_ids=None if device.type == "cpu" else [device])


def _sharded(network: Lossy, device: torch.device) -> nn.Module:
    """Shard each block and the rest by FSDP2, with parameters, gradients and optimizer on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in network.network.blocks.children():  # type: ignore[union-attr] # a transformer has them
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(network, mesh=mesh, offload_policy=policy)
    return network


def _num_threads(case: TrainCase, device: torch.device) -> int:
    """Return the threads of an optimizer on the CPU: this rank's share of the CPUs, whatever the launcher set.

    One thread suffices if the optimizer is on the GPU. Without a GPU, the network and the workers need the other CPUs.
    """
    if not case.is_offloaded or device.type == "cpu":
        return 1
    return max(1, int(cpus_per_rank(device)))
