"""The options that a plan is made for."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from numapin.base.bounds import MAX_CPUS, MAX_RANKS
from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

_HELP: Final = "numapin run --help"
_LISTS: Final = "write a list such as 0-3,8, or a set of numbers"


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


class NicLibrary(StrEnum):
    """A library that takes the NIC of its process from environment variables."""

    UCX = "ucx"
    NVSHMEM = "nvshmem"


class MemoryChoice(NamedTuple):
    """A memory policy, and the nodes named with it; the fields are those of `Request`."""

    memory: Memory
    memory_nodes: CpuSet | None

    def __str__(self) -> str:
        """Return the text that `parse_memory` reads."""
        return self.memory + ("" if self.memory_nodes is None else f"={self.memory_nodes}")


@dataclass(frozen=True, slots=True, init=False)
class Request:
    """The options that a plan is made for.

    Attributes:
        bind: The CPUs that a rank may use. A string such as "exclusive" is accepted, too.
        memory: The memory policy. None: `preferred`, or `none` with `Bind.NONE`.
        memory_nodes: The nodes of the policy, as numbers or as a list such as "0-1". None: the plan chooses.
        num_ranks: The number of ranks. None: one per visible GPU, or one rank without GPUs.
        cpus_per_rank: The maximum number of logical CPUs per rank, not shared with other ranks. None: no maximum.
        smt: Whether to use all hardware threads of a core, or only one.
        reserve_cpus: CPUs that no rank gets, as numbers or as a list such as "0-3,8".
        gpus: Indices (as in `numapin topo`), UUIDs or PCI addresses, in the order of the ranks, or a list such as
            "0-1". None: all visible GPUs.
        rank_gpus: The index of each rank's GPU, once it is known; overrides `gpus`. An index of None stands for
            an unknown GPU.
        nic_env: The libraries to which variables name each rank's nearest NIC, such as ("ucx", "nvshmem").

    Raises:
        UsageError: A word is none of the choices, a number or a list is not one or is out of range, or two options
            contradict each other.

    Example:
        ```python
        import numapin

        request = numapin.Request(bind="socket", num_ranks=4, reserve_cpus={0, 1})
        ```
    """

    bind: Bind
    memory: Memory | None
    memory_nodes: CpuSet | None
    num_ranks: int | None
    cpus_per_rank: int | None
    smt: bool
    reserve_cpus: CpuSet
    gpus: tuple[str, ...] | None
    rank_gpus: tuple[int | None, ...] | None
    nic_env: tuple[NicLibrary, ...]

    # Written by hand, because the arguments have wider types than the attributes.
    def __init__(
        self,
        *,
        bind: Bind | str = Bind.NODE,
        memory: Memory | str | None = None,
        memory_nodes: Collection[int] | str | None = None,
        num_ranks: int | None = None,
        cpus_per_rank: int | None = None,
        smt: bool = True,
        reserve_cpus: Collection[int] | str = (),
        gpus: Sequence[str | int] | str | None = None,
        rank_gpus: Sequence[int | None] | None = None,
        nic_env: Iterable[NicLibrary | str] | str = (),
    ) -> None:
        put = partial(object.__setattr__, self)  # the class is frozen
        with _refused("--bind", _HELP):
            put("bind", _one_of(Bind, bind))
        with _refused("--memory", _HELP):
            put("memory", None if memory is None else _one_of(Memory, memory))
        with _refused("--memory", _LISTS):
            put("memory_nodes", None if memory_nodes is None else _numbers(memory_nodes))
        put("num_ranks", _in_range("--nproc-per-node", num_ranks, MAX_RANKS))
        put("cpus_per_rank", _in_range("--cpus-per-rank", cpus_per_rank, MAX_CPUS))
        put("smt", smt)
        with _refused("--reserve-cpus", _LISTS):
            put("reserve_cpus", _numbers(reserve_cpus))
        with _refused("--gpus", "list the GPUs with: numapin topo"):
            names = parse_gpus(gpus) if isinstance(gpus, str) else gpus
            names = None if names is None else [gpu if isinstance(gpu, str) else str(index(gpu)) for gpu in names]
            put("gpus", None if names is None else tuple(names))
        with _refused("rank_gpus", "give an index for each rank"):
            indices = None if rank_gpus is None else [None if gpu is None else index(gpu) for gpu in rank_gpus]
            put("rank_gpus", None if indices is None else tuple(indices))
        with _refused("--nic-env", _HELP):
            put("nic_env", parse_nic_env(nic_env))

        # As far as it can be checked without a machine.
        if self.bind is Bind.NONE and cpus_per_rank is not None:
            raise UsageError("--cpus-per-rank with --bind none binds nothing", "choose a mode, such as: --bind node")
        if self.memory_nodes is not None and self.policy in (Memory.NONE, Memory.LOCAL):
            raise UsageError(f"--memory {self.policy} takes no nodes", "name them with bind, preferred or interleave")

    @property
    def policy(self) -> Memory:
        """The memory policy; `none` or `preferred` by default (see `memory`)."""
        return self.memory or (Memory.NONE if self.bind is Bind.NONE else Memory.PREFERRED)


_Word = TypeVar("_Word", Bind, Memory, NicLibrary)


def parse_memory(text: str) -> MemoryChoice:
    """Parse a policy with or without nodes: preferred, bind=0,2, interleave=0-3. Raises ValueError."""
    word, equals, nodes = text.partition("=")
    return MemoryChoice(_one_of(Memory, word), CpuSet.parse(nodes) if equals else None)


def parse_nic_env(words: Iterable[str]) -> tuple[NicLibrary, ...]:
    """Parse libraries, or a list of them as text: ucx,nvshmem. Raises ValueError."""
    named = map(str.strip, words.split(",")) if isinstance(words, str) else words
    return tuple(dict.fromkeys(_one_of(NicLibrary, word) for word in named))


def parse_gpus(text: str) -> tuple[str, ...]:
    """Parse a list of GPUs: indices, ranges of them (0-3), UUIDs or PCI addresses. Raises ValueError."""
    keys: list[str] = []
    for key in map(str.strip, text.split(",")):
        if not key:
            raise ValueError(f"{text!r} has an empty entry; write a list such as 0,2")
        is_range = re.fullmatch("[0-9]+-[0-9]+", key)  # a UUID may begin with a digit, too
        keys += map(str, sorted(CpuSet.parse(key))) if is_range else [key]
    return tuple(keys)


@contextmanager
def _refused(option: str, hint: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: {error}", hint) from None


def _numbers(members: Collection[int] | str) -> CpuSet:
    return CpuSet.parse(members) if isinstance(members, str) else CpuSet(map(index, members))


def _in_range(option: str, given: int | None, most: int) -> int | None:
    """Return a whole number from 1 on. Raises UsageError."""
    if given is None:
        return None
    try:
        number = index(given)
    except TypeError:
        raise UsageError(f"{option} is {given!r}; it must be a whole number", _HELP) from None
    if not 1 <= number <= most:
        bound = "at least 1" if number < 1 else f"at most {most}"
        num_bits = number.bit_length()
        shown = str(number) if num_bits < 64 else f"a number of {num_bits} bits"  # thousands of digits say less
        raise UsageError(f"{option} is {shown}; it must be {bound}", _HELP)
    return number


def _one_of(kind: type[_Word], word: object) -> _Word:
    if not isinstance(word, str) or word not in list(kind):
        raise ValueError(f"{word!r} is not one of {', '.join(kind)}")
    return kind(word)
