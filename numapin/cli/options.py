"""Options that several commands share, and what they mean. Edge.

Comes in: click's parsed values. Goes out: a `Request` for the planner, and what `discover` takes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numapin import cpulist
from numapin.errors import UsageError
from numapin.request import Bind, Memory, Request
from numapin.topology.discover import discover
from numapin.topology.visible import environment_for

if TYPE_CHECKING:
    from numapin.topology.model import Topology


# click.ParamType takes a type argument since click 8.2 only; hence the ignores below.
class CpuList(click.ParamType):  # type: ignore[type-arg]
    """A Linux list string, such as 0-3,8."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[int]:  # noqa: ANN401
        """Parse the list, or fail with what is wrong in it."""
        if isinstance(value, frozenset):
            return value
        try:
            return cpulist.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """A memory policy, None for the default, and the nodes named with it."""

    policy: Memory | None
    nodes: frozenset[int] | None = None


class MemoryPolicy(click.ParamType):  # type: ignore[type-arg]
    """A policy with optional nodes: preferred, bind=0,2, interleave=0-3."""

    name = "POLICY[=NODES]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> MemoryChoice:  # noqa: ANN401
        """Parse policy and nodes."""
        if isinstance(value, MemoryChoice):
            return value
        word, equals, nodes = value.partition("=")
        if word not in list(Memory):
            self.fail(f"{word!r} is not one of {', '.join(Memory)}", param, ctx)
        return MemoryChoice(policy=Memory(word), nodes=CpuList().convert(nodes, param, ctx) if equals else None)


class GpuNodes(click.ParamType):  # type: ignore[type-arg]
    """Pairs of a GPU (NVML index, UUID, PCI address) and its node: 0=1,1=1."""

    name = "GPU=NODE,…"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[tuple[str, int], ...]:
        """Parse the pairs, whatever they name."""
        if isinstance(value, tuple):
            return value
        pairs = tuple(item.strip().rpartition("=") for item in value.split(","))
        for gpu, equals, node in pairs:
            if not (gpu and node.isdecimal()):
                self.fail(f"{gpu + equals + node!r} is not GPU=NODE, such as 0=1", param, ctx)
        return tuple((gpu, int(node)) for gpu, _, node in pairs)


GPU_NODES = click.Option(
    ["--gpu-nodes"],
    type=GpuNodes(),
    metavar="GPU=NODE,…",
    help="The NUMA nodes of GPUs, where the machine does not tell or is wrong: 0=1,1=1.",
)

BINDING: tuple[click.Option, ...] = (
    click.Option(
        ["--bind"],
        type=click.Choice([mode.value for mode in Bind]),
        help="Which CPUs a rank gets: all of its GPU's node (default), of the socket, its own part of the node, "
        "or one L3 group of it.",
    ),
    click.Option(
        ["--memory"],
        type=MemoryPolicy(),
        help="Memory policy: none, local, preferred (default), bind, interleave; nodes may be named: bind=0,2.",
    ),
    click.Option(
        ["--cpus-per-rank"], type=click.IntRange(min=1), metavar="N", help="At most N logical CPUs a rank, not shared."
    ),
    click.Option(["--smt/--no-smt"], default=True, help="Use all hardware threads of a core, or one."),
    click.Option(["--reserve-cpus"], type=CpuList(), metavar="LIST", help="CPUs that no rank gets, such as 0-1."),
    click.Option(
        ["--gpus"],
        metavar="LIST",
        help="GPUs to use, in the order of the ranks: NVML indices, UUIDs or PCI addresses. "
        "Exported as CUDA_VISIBLE_DEVICES.",
    ),
    GPU_NODES,
    click.Option(["--strict"], is_flag=True, help="Fail (status 5) where anything cannot be bound exactly as asked."),
)

MACHINE: tuple[click.Option, ...] = (
    click.Option(
        ["--root"],
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Read a captured machine: a directory with its sys/ and proc/.",
    ),
    click.Option(
        ["--machine"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read a machine file: our JSON (topo --save), hwloc 2 or 3 XML, NCCL topology XML.",
    ),
)


def request_from(values: dict[str, Any], *, num_ranks: int | None, numa_binding: str | None = None) -> Request:
    """Make a request of parsed binding options; `numa_binding` is torchrun's option, which --bind overrules."""
    memory = values["memory"] or MemoryChoice(policy=None)
    return Request(
        bind=Bind(values["bind"] or numa_binding or Bind.NODE),
        memory=memory.policy,
        memory_nodes=memory.nodes,
        num_ranks=num_ranks,
        cpus_per_rank=values["cpus_per_rank"],
        smt=values["smt"],
        reserve_cpus=values["reserve_cpus"] or frozenset(),
        gpus=gpu_keys(values["gpus"]),
    )


def topology_from(
    *, gpu_nodes: tuple[tuple[str, int], ...] | None, root: Path | None = None, machine: Path | None = None
) -> Topology:
    """Read the machine that the options name; this one where they name none."""
    return discover(root=root, machine=machine, environ=os.environ, gpu_nodes=gpu_nodes or ())


def gpu_keys(text: str | None) -> tuple[str, ...] | None:
    """Split the value of --gpus into what names each GPU. Raises UsageError for an empty entry."""
    if text is None:
        return None
    keys = tuple(key.strip() for key in text.split(","))
    if not all(keys):
        raise UsageError(f"--gpus {text!r} has an empty entry", "for example: --gpus 0,2")
    return keys


def gpu_environment(topology: Topology, named: str | None) -> dict[str, str]:
    """Return what shows CUDA the GPUs that --gpus named, by UUID, in the order of the ranks."""
    return environment_for(topology, gpu_keys(named))
