"""Options that several commands share, and what they mean. Edge.

Comes in: click's parsed values. Goes out: typed options, the planner's `Request`, and the machine's
`Topology`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numapin.base.cpu_set import CpuSet
from numapin.plan.request import Bind, Request, parse_gpus, parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from numapin.plan.request import MemoryChoice
    from numapin.topology.model import Topology


class Parsed(click.ParamType):  # type: ignore[type-arg] # takes a type argument since click 8.2 only
    """What `parse` makes of the text. Its ValueError is what the user is told, and the remedy if it names none."""

    def __init__(self, name: str, parse: Callable[[str], object], *, remedy: str = "") -> None:
        self.name, self._parse, self._remedy = name, parse, remedy

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Parse text; what is none is parsed already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{error}; {self._remedy}" if self._remedy else str(error), param, ctx)


class FilePath(click.Path):
    """A path, which is not looked at here: whoever opens it says what is wrong."""

    def __init__(self, *, dir_okay: bool = True, path_type: type[str | Path] = Path) -> None:
        super().__init__(path_type=path_type, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Make a path. Refuses a NUL, which no call of the system takes."""
        if "\0" in os.fspath(value):
            self.fail("a path cannot hold a NUL character", param, ctx)
        return super().convert(value, param, ctx)


class MachinePath(FilePath):
    """A machine file, or the name of a built-in machine, which completion offers besides files."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete names of built-in machines, and files."""
        from click.shell_completion import CompletionItem

        from numapin.topology.examples import example_names

        names = [CompletionItem(name) for name in example_names() if name.startswith(incomplete)]
        return [*names, *super().shell_complete(ctx, param, incomplete)]


def _parse_gpu_nodes(text: str) -> tuple[tuple[str, int], ...]:
    """Read pairs of a GPU (NVML index, UUID, PCI address), whatever it names, and its node: 0=1,1=1."""
    pairs = tuple(item.strip().rpartition("=") for item in text.split(","))
    for gpu, equals, node in pairs:
        if not (gpu and node.isdecimal()):
            raise ValueError(f"{gpu + equals + node!r} is not GPU=NODE, such as 0=1")
    return tuple((gpu, int(node)) for gpu, _, node in pairs)


def _parse_pids(text: str) -> tuple[int, ...]:
    """Read process ids, separated by commas. Raises ValueError for what is no number."""
    for word in text.split(","):
        if not (word.strip().isascii() and word.strip().isdecimal()):
            raise ValueError(f"{word!r} is not a process id")
    return tuple(int(word) for word in text.split(","))


JOB: tuple[click.Parameter, ...] = (
    click.Argument(["run"], required=False),
    click.Option(
        ["--pid", "pids"],
        type=Parsed("PID,…", _parse_pids),
        help="Process ids of the ranks, or of their launcher (torchrun, srun).",
    ),
)

GPU_NODES = click.Option(
    ["--gpu-nodes"],
    type=Parsed("GPU=NODE,…", _parse_gpu_nodes),
    help="NUMA nodes of GPUs, if the machine reports none or wrong ones: 0=1,1=1.",
)

BINDING: tuple[click.Option, ...] = (
    click.Option(
        ["--bind"],
        type=click.Choice([mode.value for mode in Bind]),
        help="CPUs of each rank: all of its GPU's node (default), all of the socket, an exclusive share of the node, "
        "or one L3 group of the node.",
    ),
    click.Option(
        ["--memory"],
        type=Parsed("POLICY[=NODES]", parse_memory),
        help="Memory policy: none, local, preferred (default), bind or interleave; with nodes: bind=0,2.",
    ),
    click.Option(
        ["--cpus-per-rank"],
        type=click.IntRange(min=1),
        metavar="N",
        help="At most N logical CPUs per rank, shared with no other rank.",
    ),
    click.Option(["--smt/--no-smt"], default=True, help="Use all hardware threads of each core (default), or one."),
    click.Option(
        ["--reserve-cpus"], type=Parsed("LIST", CpuSet.parse), help="Keep these CPUs free of ranks, e.g. 0-1."
    ),
    click.Option(
        ["--gpus"],
        type=Parsed("LIST", parse_gpus),
        help="GPUs to use, in rank order: NVML indices, UUIDs or PCI addresses. Exported as CUDA_VISIBLE_DEVICES.",
    ),
    GPU_NODES,
    click.Option(
        ["--strict"], is_flag=True, help="Fail with status 5 if a binding cannot be applied exactly as requested."
    ),
)

MACHINE: tuple[click.Option, ...] = (
    click.Option(
        ["--root"],
        type=FilePath(),
        metavar="DIR",
        help="Read a captured machine: a directory that holds its sys/ and proc/.",
    ),
    click.Option(
        ["--machine"],
        type=MachinePath(),
        metavar="FILE",
        help="Read a machine file: numapin JSON (topo --save), hwloc 2 or 3 XML, NCCL topology XML; or a built-in "
        "machine, e.g. example:dgx-a100 (topo --machine example: lists them).",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingOptions:
    """The parsed values of the options in `BINDING`, by click's names; None is an option that was not given."""

    bind: str | None
    memory: MemoryChoice | None
    cpus_per_rank: int | None
    smt: bool
    reserve_cpus: CpuSet | None
    gpus: tuple[str, ...] | None
    gpu_nodes: tuple[tuple[str, int], ...] | None
    strict: bool

    def request(self, *, num_ranks: int | None, numa_binding: str | None = None) -> Request:
        """Make a request of them; `numa_binding` is torchrun's option, which --bind overrules. Raises UsageError."""
        return Request(
            bind=Bind(self.bind or numa_binding or Bind.NODE),
            memory=self.memory.memory if self.memory else None,
            memory_nodes=self.memory.memory_nodes if self.memory else None,
            num_ranks=num_ranks,
            cpus_per_rank=self.cpus_per_rank,
            smt=self.smt,
            reserve_cpus=self.reserve_cpus or CpuSet(),
            gpus=self.gpus,
        )


def topology_from(
    *, gpu_nodes: tuple[tuple[str, int], ...] | None, root: Path | None = None, machine: Path | None = None
) -> Topology:
    """Read the machine that the options name; this one where they name none."""
    from numapin.topology.discover import discover  # not all that have these options read it

    return discover(root=root, machine=machine, environ=os.environ, gpu_nodes=gpu_nodes or ())
