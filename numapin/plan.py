"""Stage 2: which CPUs and which memory each rank must use. Pure.

Comes in: a `Topology` and a `Request`. Goes out: a `Plan` (schema numapin.plan/1) that says for each rank what it gets
and why. The same input gives the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin import cpulist
from numapin.bounds import MAX_RANKS
from numapin.errors import BindingRefused
from numapin.fields import Fields
from numapin.request import Bind, Memory

if TYPE_CHECKING:
    from numapin.allot import Draft, Machine
    from numapin.request import Request
    from numapin.topology.model import Topology

SCHEMA: Final = "numapin.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRef:
    """A GPU by its names."""

    index: int
    uuid: str | None
    pci: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank gets. `node` is its GPU's node, `nodes` those of its memory policy; `reason` says why.

    `exact` is False where the rank got less than was asked. `num_threads` is the number of physical cores that are its
    share.
    """

    local_rank: int
    gpu: GpuRef | None
    node: int | None
    cpus: frozenset[int]
    nodes: frozenset[int]
    memory: Memory
    num_threads: int
    exact: bool
    reason: str

    def require_exact(self, *, see: str = "numapin plan") -> None:
        """Raise BindingRefused, which is what --strict means, unless the rank got what was asked."""
        if not self.exact:
            raise BindingRefused(
                f"--strict: rank {self.local_rank} cannot be bound exactly: {self.reason}",
                f"see every decision with: {see}; without --strict the rank runs with what it gets",
            )

    def to_json(self) -> dict[str, object]:
        """Return the JSON form of one rank."""
        gpu = self.gpu and {"index": self.gpu.index, "uuid": self.gpu.uuid, "pci": self.gpu.pci}
        return {
            "local_rank": self.local_rank,
            "gpu": gpu,
            "node": self.node,
            "cpus": cpulist.render(self.cpus),
            "nodes": cpulist.render(self.nodes),
            "memory": self.memory.value,
            "num_threads": self.num_threads,
            "exact": self.exact,
            "reason": self.reason,
        }

    @classmethod
    def from_fields(cls, f: Fields) -> RankPlan:
        """Read the JSON form of one rank."""
        gpu = f.optional_mapping("gpu")
        return cls(
            local_rank=f.number("local_rank"),
            gpu=None
            if gpu is None
            else GpuRef(index=gpu.number("index"), uuid=gpu.optional_text("uuid"), pci=gpu.optional_text("pci")),
            node=f.optional_number("node"),
            cpus=f.numbers("cpus"),
            nodes=f.numbers("nodes"),
            memory=Memory(f.text("memory")),
            num_threads=f.number("num_threads"),
            exact=f.flag("exact"),
            reason=f.text("reason"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank of one host gets, in the order of local ranks; `warnings` are for the user, once."""

    bind: Bind
    memory: Memory
    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Return whether every rank got what was asked."""
        return all(rank.exact for rank in self.ranks)

    def require_exact(self) -> None:
        """Raise BindingRefused for the first rank that did not get what was asked."""
        for rank in self.ranks:
            rank.require_exact()

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.plan/1)."""
        return {
            "schema": SCHEMA,
            "bind": self.bind.value,
            "memory": self.memory.value,
            "ranks": [rank.to_json() for rank in self.ranks],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, text: str, *, source: str = "JSON") -> Plan:
        """Read the JSON form. Raises MachineFileError that names `source` and the element."""
        top = Fields.top(source, text, hint="write a plan with: numapin plan --json")
        top.expect_schema(SCHEMA)
        try:
            return cls(
                bind=Bind(top.text("bind")),
                memory=Memory(top.text("memory")),
                ranks=top.each("ranks", RankPlan.from_fields, most=MAX_RANKS),
                warnings=top.texts("warnings"),
            )
        except ValueError as error:
            raise top.error("", str(error)) from None


def default_num_ranks(topology: Topology, *, is_this_host: bool = True) -> int | None:
    """Return the number of ranks where nobody says it: None, which is one per GPU, or 1 where no driver told of one.

    Another machine's file need not know what its driver tells, and counts with the GPUs that it has.
    """
    return 1 if is_this_host and not topology.has_usable_gpu else None


def make_plan(topology: Topology, request: Request) -> Plan:
    """Decide which CPUs and memory each rank of this host uses.

    1. Usable CPUs are the allowed ones, less `reserve_cpus`, less all but one of each core's without SMT.
    2. Rank n uses GPU n mod G. Without GPUs, ranks are spread over the nodes.
    3. A rank's home is its GPU's node; a home without usable CPUs is replaced by the nearest node that has some.
    4. The mode makes a pool of CPUs of the home.
    5. Ranks of one pool share it, or split it by whole cores (`exclusive`, `cpus_per_rank`), in the order of their
       GPUs' PCI addresses, so that renumbering GPUs moves no CPUs.
    6. A rank's thread count is its part of the physical cores of its pool.
    7. Its memory is on its GPU's node (the package's nodes for `socket`), or the nearest allowed one.

    Raises PlanError where no CPU is left or exclusive ranks outnumber the cores, and UsageError for a CPU, node or GPU
    that does not exist.
    """
    # Imported here because each rank reads its slice of a plan through this module before its own program starts.
    from numapin.allot import allot

    machine, drafts = allot(topology, request)
    ranks = tuple(_with_memory(machine, request, draft) for draft in drafts)
    return Plan(
        bind=request.bind,
        memory=request.policy,
        ranks=ranks,
        warnings=(*topology.warnings, *inexact_warnings(ranks), *_idle_warning(machine, request, ranks)),
    )


def _with_memory(machine: Machine, request: Request, draft: Draft) -> RankPlan:
    from numapin.allot_memory import memory_of

    draft, memory, nodes = memory_of(machine, request, draft)
    gpu = draft.gpu
    return RankPlan(
        local_rank=draft.local_rank,
        gpu=None if gpu is None else GpuRef(index=gpu.index, uuid=gpu.uuid, pci=gpu.pci),
        node=draft.home,
        cpus=draft.cpus,
        nodes=nodes,
        memory=memory,
        num_threads=draft.num_threads,
        exact=draft.exact,
        reason="; ".join(draft.why),
    )


def inexact_warnings(ranks: tuple[RankPlan, ...]) -> list[str]:
    """Say once each why ranks got less than was asked."""
    why: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.exact:
            why.setdefault(rank.reason, []).append(rank.local_rank)
    return [f"rank{'s' if len(told) > 1 else ''} {cpulist.render(told)}: {reason}" for reason, told in why.items()]


def _idle_warning(machine: Machine, request: Request, ranks: tuple[RankPlan, ...]) -> tuple[str, ...]:
    """Say how many CPUs stay idle on nodes without a rank that `--bind socket` would use."""
    if request.bind in (Bind.NONE, Bind.SOCKET):
        return ()
    homes = {rank.node for rank in ranks if rank.node is not None}
    reachable = frozenset().union(*(machine.package_nodes(home) for home in homes)) if homes else frozenset()
    used = frozenset().union(*(rank.cpus for rank in ranks))
    idle = sorted(n for n in reachable - homes if machine.node_cpus[n] and not machine.node_cpus[n] & used)
    if not idle:
        return ()
    count = sum(len(machine.node_cpus[node]) for node in idle)
    return (f"{count} CPUs of nodes {cpulist.render(idle)}, which have no rank, stay idle; --bind socket uses them",)
