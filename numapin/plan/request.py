"""The options that a plan is made for. Pure.

Comes in: options, as text or parsed. Goes out: a `Request`, checked as far as that is possible without a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeVar

from numapin.base.bounds import MAX_CPUS, MAX_RANKS
from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError


class Bind(StrEnum):
    """The CPUs that a rank may use, in torchrun's words."""

    NONE = "none"
    """All allowed CPUs."""
    NODE = "node"
    """All CPUs of its GPU's node, shared with the other ranks of that node."""
    SOCKET = "socket"
    """All CPUs of its GPU's package, including nodes without a GPU."""
    EXCLUSIVE = "exclusive"
    """A part of its GPU's node that no other rank gets."""
    CORE_COMPLEX = "core-complex"
    """The CPUs of one L3 cache of its GPU's node."""


class Memory(StrEnum):
    """The memory policy of a rank."""

    NONE = "none"
    LOCAL = "local"
    """On the node of the CPU that first touches the page, regardless of the policy that the launcher inherited."""
    PREFERRED = "preferred"
    """On the rank's nodes while they have free memory."""
    BIND = "bind"
    """On the rank's nodes only; a full node wakes the OOM killer."""
    INTERLEAVE = "interleave"
    """Page by page over all allowed nodes with CPUs, or over the nodes named."""


class MemoryChoice(NamedTuple):
    """A memory policy, and the nodes named with it; the fields are those of `Request`."""

    memory: Memory
    memory_nodes: CpuSet | None

    def __str__(self) -> str:
        """Return the text that `parse_memory` reads."""
        return self.memory + ("" if self.memory_nodes is None else f"={self.memory_nodes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options that a plan is made for.

    Attributes:
        bind: The CPUs that a rank may use.
        memory: The memory policy. None: `preferred`, or `none` with `Bind.NONE`.
        memory_nodes: The nodes of the policy. None: the plan chooses.
        num_ranks: The number of ranks. None: one per visible GPU, or one rank without GPUs.
        cpus_per_rank: The maximum number of logical CPUs per rank, not shared with other ranks. None: no maximum.
        smt: Whether to use all hardware threads of a core, or only one.
        reserve_cpus: CPUs that no rank gets.
        gpus: NVML indices, UUIDs or PCI addresses, in the order of the ranks. None: all visible GPUs.
        rank_gpus: The NVML index of each rank's GPU, once it is known; overrides `gpus`. An index of None stands for
            an unknown GPU.

    Raises:
        UsageError: A number is out of range, or two options contradict each other.

    Example:
        ```python
        import numapin

        request = numapin.Request(bind=numapin.Bind.SOCKET, num_ranks=4, reserve_cpus=frozenset({0, 1}))
        ```
    """

    bind: Bind = Bind.NODE
    memory: Memory | None = None
    memory_nodes: CpuSet | None = None
    num_ranks: int | None = None
    cpus_per_rank: int | None = None
    smt: bool = True
    reserve_cpus: CpuSet = CpuSet()
    gpus: tuple[str, ...] | None = None
    rank_gpus: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        """Check the request as far as that is possible without a machine. Raises UsageError."""
        _require_in_range("--nproc-per-node", self.num_ranks, MAX_RANKS)
        _require_in_range("--cpus-per-rank", self.cpus_per_rank, MAX_CPUS)
        if self.cpus_per_rank is not None and self.bind is Bind.NONE:
            raise UsageError("--cpus-per-rank with --bind none binds nothing", "choose a mode, such as: --bind node")
        if self.memory_nodes is not None and self.policy in (Memory.NONE, Memory.LOCAL):
            raise UsageError(f"--memory {self.policy} takes no nodes", "name them with bind, preferred or interleave")

    @property
    def policy(self) -> Memory:
        """The memory policy; `none` or `preferred` by default (see `memory`)."""
        return self.memory or (Memory.NONE if self.bind is Bind.NONE else Memory.PREFERRED)


_Word = TypeVar("_Word", Bind, Memory)


def parse_bind(text: str) -> Bind:
    """Parse a mode. Raises ValueError."""
    return _one_of(Bind, text)


def parse_memory(text: str) -> MemoryChoice:
    """Parse a policy with or without nodes: preferred, bind=0,2, interleave=0-3. Raises ValueError."""
    word, equals, nodes = text.partition("=")
    return MemoryChoice(_one_of(Memory, word), CpuSet.parse(nodes) if equals else None)


def parse_gpus(text: str) -> tuple[str, ...]:
    """Parse a list of GPUs: NVML indices, UUIDs or PCI addresses. Raises ValueError for an empty entry."""
    keys = tuple(key.strip() for key in text.split(","))
    if not all(keys):
        raise ValueError(f"{text!r} has an empty entry; write a list such as 0,2")
    return keys


def _require_in_range(option: str, number: int | None, most: int) -> None:
    if number is None or 1 <= number <= most:
        return
    bound = "at least 1" if number < 1 else f"at most {most}"
    raise UsageError(f"{option} is {_shown(number)}; it must be {bound}", "numapin run --help")


def _shown(number: int) -> str:
    """Return the number's digits, or its size if they are too many for a line."""
    return str(number) if number.bit_length() < 64 else f"a number of {number.bit_length()} bits"


def _one_of(kind: type[_Word], word: str) -> _Word:
    if word not in list(kind):
        raise ValueError(f"{word!r} is not one of {', '.join(kind)}")
    return kind(word)
