"""Options that several commands share."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from numapin.base.cpu_set import CpuSet
from numapin.plan.request import Bind, Memory, Request, parse_gpus, parse_memory, parse_nic_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from click.shell_completion import CompletionItem

    from numapin.plan.request import MemoryChoice, NicLibrary
    from numapin.topology.model import Topology

T = TypeVar("T")
C = TypeVar("C", bound="Callable[..., Any]")


def record_of(record: type[T], values: Mapping[str, object], **more: object) -> T:
    """Return a record made of those values that are its fields, and more."""
    make: Callable[..., T] = record
    names = [field.name for field in fields(record)]  # type: ignore[arg-type] # all of our records are dataclasses
    return make(**{name: values[name] for name in names if name in values}, **more)


class Parsed(click.ParamType):  # type: ignore[type-arg] # takes a type argument since click 8.2 only
    """A parameter type from a parsing function, whose ValueError becomes the message; `remedy` is appended to it.

    Completion offers `words`, and with `many` also after a comma.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[str], object],
        *,
        remedy: str = "",
        words: Iterable[str] = (),
        many: bool = False,
    ) -> None:
        self.name, self._parse, self._remedy = name, parse, remedy
        self._words, self._many = words, many

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Parse text. Values of other types, such as defaults, stay as they are."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{error}; {self._remedy}" if self._remedy else str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer the words; in a list, those that are not in it yet."""
        from click.shell_completion import CompletionItem

        del ctx, param
        listed, comma, typed = incomplete.rpartition(",") if self._many else ("", "", incomplete)
        offered = [word for word in self._words if word.startswith(typed) and word not in listed.split(",")]
        return [CompletionItem(f"{listed}{comma}{word}") for word in offered]


class Seconds(click.FloatRange):
    """A number of seconds within a range; a range of click's also takes "nan", and "inf" if it has no upper bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return number


class FilePath(click.Path):
    """A path that is not checked here: opening it reports what is wrong."""

    def __init__(self, *, dir_okay: bool = True, path_type: type[str | Path] = Path) -> None:
        super().__init__(path_type=path_type, dir_okay=dir_okay)
        self.name = "file"  # in help texts

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Make a path. A NUL is refused, because no system call accepts it."""
        if "\0" in os.fspath(value):
            self.fail("a path cannot hold a NUL character", param, ctx)
        return super().convert(value, param, ctx)


class MachinePath(FilePath):
    """A machine file or the name of a built-in machine; completion offers both."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete names of built-in machines, and files."""
        from click.shell_completion import CompletionItem

        from numapin.topology.discover import example_names

        names = [CompletionItem(name) for name in example_names() if name.startswith(incomplete)]
        return [*names, *super().shell_complete(ctx, param, incomplete)]


def _parse_gpu_nodes(text: str) -> tuple[tuple[str, int], ...]:
    """Parse pairs of GPUs (an index or a range as in `numapin topo`, a UUID or PCI address) and their node: 0-1=1."""
    pairs: list[tuple[str, int]] = []
    for item in map(str.strip, text.split(",")):
        gpu, _, node = item.rpartition("=")
        if not (gpu and node.isdecimal()):
            raise ValueError(f"{item!r} is not GPU=NODE, such as 0=1")
        pairs += [(key, int(node)) for key in parse_gpus(gpu)]
    return tuple(pairs)


def _parse_pids(text: str) -> tuple[int, ...]:
    """Parse process ids, separated by commas. Raises ValueError."""
    words = text.split(",")
    for word in words:
        if not (word.strip().isascii() and word.strip().isdecimal()):
            raise ValueError(f"{word!r} is not a process id")
    return tuple(map(int, words))


def run_names(*, are_live: bool) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the completion of @last and the names of runs, with their commands, beside folders or files."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from numapin.base.formats import quote_all
        from numapin.base.strict_json import decode
        from numapin.launcher.run_folder import LAST, all_runs, live_runs
        from numapin.rank import handover

        folders = live_runs(os.environ) if are_live else all_runs(os.environ)[::-1]
        found = [CompletionItem(LAST, help="the newest run")] if folders and LAST.startswith(incomplete) else []
        for folder in map(Path, folders):
            if folder.name.startswith(incomplete):
                command: object = None
                with suppress(OSError, ValueError):
                    command = decode(handover.read_text(str(folder / handover.COMMAND)))
                argv = command.get("argv") if isinstance(command, dict) else None
                words = argv[1:] if isinstance(argv, list) else []
                found.append(CompletionItem(folder.name, help=quote_all(map(str, words))))
        return [*found, CompletionItem(incomplete, type="dir" if are_live else "file")]

    return complete


PIDS = click.Option(
    ["--pid", "pids"],
    type=Parsed("PID,...", _parse_pids),
    help="Process ids of the ranks, or of their launcher (torchrun, srun).",
)

JOB: tuple[click.Parameter, ...] = (
    click.Argument(["run"], required=False, shell_complete=run_names(are_live=True)),
    PIDS,
)

GPU_NODES = click.Option(
    ["--gpu-nodes"],
    type=Parsed("GPU=NODE,...", _parse_gpu_nodes),
    help="NUMA nodes of GPUs, if the machine reports none or wrong ones, e.g. 0-3=0,4-7=1.",
)

BINDING: tuple[click.Option, ...] = (
    click.Option(
        ["--bind"],
        type=click.Choice([mode.value for mode in Bind]),
        help="CPUs of each rank: all of its GPU's node (default), all of the socket, an exclusive share of the node "
        "or one L3 group.",
    ),
    click.Option(
        ["--memory"],
        type=Parsed("POLICY[=NODES]", parse_memory, words=list(Memory)),
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
        help="GPUs to use, in rank order: indices as in numapin topo (NVML's), e.g. 0-3, UUIDs or PCI addresses. "
        "Exported as CUDA_VISIBLE_DEVICES, or the variables of AMD's or Intel's runtime.",
    ),
    GPU_NODES,
    click.Option(
        ["--nic-env"],
        type=Parsed("LIST", parse_nic_env),
        help="Name each rank's nearest NIC to ucx (UCX_NET_DEVICES) or nvshmem (NVSHMEM_HCA_LIST). Variables that you "
        "have set are kept.",
    ),
    click.Option(["--strict"], is_flag=True, help="Fail with status 5 if a binding cannot be applied as requested."),
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
        help="Read a machine file: numapin JSON (topo --save), hwloc 2 or 3 XML, NCCL topology XML; or a built-in "
        "machine, e.g. example:dgx-a100 (without a name, the error lists them).",
    ),
)


def json_option(schema: str) -> Callable[[C], C]:
    """Return --json, as `as_json`, for a command that prints a table otherwise."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {schema}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingOptions:
    """The parsed values of the options in `BINDING`, by click's names. None: the option was not given."""

    bind: str | None
    memory: MemoryChoice | None
    cpus_per_rank: int | None
    smt: bool
    reserve_cpus: CpuSet | None
    gpus: tuple[str, ...] | None
    gpu_nodes: tuple[tuple[str, int], ...] | None
    nic_env: tuple[NicLibrary, ...] | None
    strict: bool

    def request(self, *, num_ranks: int | None, numa_binding: str | None = None) -> Request:
        """Return the request. --bind wins over `numa_binding`, which is torchrun's option. Raises UsageError."""
        memory, memory_nodes = self.memory or (None, None)
        return Request(
            bind=Bind(self.bind or numa_binding or Bind.NODE),
            memory=memory,
            memory_nodes=memory_nodes,
            num_ranks=num_ranks,
            cpus_per_rank=self.cpus_per_rank,
            smt=self.smt,
            reserve_cpus=self.reserve_cpus or CpuSet(),
            gpus=self.gpus,
            nic_env=self.nic_env or (),
        )


def topology_from(
    *, gpu_nodes: tuple[tuple[str, int], ...] | None, root: Path | None = None, machine: Path | None = None
) -> Topology:
    """Read the machine that --root or --machine names, by default this host."""
    from numapin.topology.discover import discover  # commands that read no machine need not import it

    return discover(root=root, machine=machine, environ=os.environ, gpu_nodes=gpu_nodes or ())
