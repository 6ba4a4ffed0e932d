"""The plan as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Self

from numapin.base.bounds import MAX_RANKS
from numapin.base.cpu_set import CpuSet
from numapin.base.records import AtMost, Texts, read_record, to_json
from numapin.base.text import counted, printable_lines
from numapin.errors import BindingRefused
from numapin.plan.request import Bind, Memory, NicLibrary

SCHEMA: Final = "numapin.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRef:
    """A GPU by its names.

    Attributes:
        index: Its index (as in `numapin topo`).
        uuid: Its UUID.
        pci: Its PCI address.
    """

    index: int
    uuid: str | None
    pci: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The CPUs and the memory of one rank.

    Attributes:
        local_rank: Its number on the host.
        gpu: Its GPU. None: it has no GPU, or an unknown one.
        node: The node of its GPU, or the node that it was given without a GPU. None: unknown.
        cpus: The CPUs that it may use.
        nodes: The nodes of its memory policy.
        memory: Its memory policy.
        num_threads: Its share of the physical cores.
        exact: Whether it gets what was requested.
        reason: Why it gets these CPUs and this memory.
        within: The only nodes where its pages may be, because `preferred` and `local` would spill into GPU memory.
            None: not limited.
        nics: The RDMA NICs that are nearest to its GPU, its own first. None: none is known.
        nics_reason: Why its first NIC is its own.
        nic_env: The libraries to which variables name its first NIC. None: the plan is older than this field.
        roles: None, unless the plan was read from a file of an older version, which divided `cpus` by role.
    """

    local_rank: int
    gpu: GpuRef | None
    node: int | None
    cpus: CpuSet
    nodes: CpuSet
    memory: Memory
    num_threads: int
    exact: bool
    reason: str
    within: CpuSet | None = None
    nics: Texts | None = None
    nics_reason: str | None = None
    nic_env: Annotated[tuple[NicLibrary, ...], AtMost(len(NicLibrary))] | None = ()
    roles: Mapping[str, object] | None = None

    @property
    def kernel_policy(self) -> tuple[Memory, CpuSet]:
        """The policy that the kernel is given, with its nodes: `bind` if the pages must stay within some nodes."""
        return (Memory.BIND, self.within) if self.within else (self.memory, self.nodes)

    def __str__(self) -> str:
        """Return what the rank gets in one line."""
        gpu = "no GPU" if self.gpu is None else f"GPU {self.gpu.index}"
        node = "node unknown" if self.node is None else f"node {self.node}"
        policy = self.memory if self.memory in (Memory.NONE, Memory.LOCAL) else f"{self.memory} {self.nodes}"
        threads = counted(self.num_threads, "thread")
        less = "" if self.exact else " (not exact)"
        return f"rank {self.local_rank}: {gpu}, {node}, CPUs {self.cpus}, memory {policy}, {threads}{less}"

    def require_exact(self, *, see: str = "numapin plan") -> None:
        """Raise an error unless the rank gets what was requested, as `--strict` does.

        Args:
            see: The command that shows every decision; it goes into the hint.

        Raises:
            BindingRefused: The rank gets less than was requested.
        """
        if not self.exact:
            raise BindingRefused(
                f"--strict: rank {self.local_rank} cannot be bound exactly: {self.reason}",
                f"see every decision with: {see}; without --strict the rank runs with what it gets",
            )

    def to_json(self) -> dict[str, object]:
        """Return the JSON form of one rank, an element of `ranks` in schema numapin.plan/1."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str, *, source: str, hint: str) -> Self:
        """Read the JSON form of one rank. Raises MachineFileError that names `source` and the element."""
        return read_record(cls, text, source=source, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The CPUs and the memory of every rank of one host.

    Attributes:
        bind: The mode that was requested.
        memory: The memory policy that was requested.
        ranks: The plan of each rank, in the order of local ranks.
        warnings: Messages to show to the user once.
    """

    bind: Bind
    memory: Memory
    ranks: Annotated[tuple[RankPlan, ...], AtMost(MAX_RANKS)]
    warnings: Texts = ()

    @property
    def exact(self) -> bool:
        """Whether every rank gets what was requested."""
        return all(rank.exact for rank in self.ranks)

    def require_exact(self) -> None:
        """Raise an error unless every rank gets what was requested.

        Raises:
            BindingRefused: A rank gets less than was requested; the message names the first one.
        """
        for rank in self.ranks:
            rank.require_exact()

    def __str__(self) -> str:
        """Return the modes and a line per rank; the reasons are in `ranks`."""
        head = f"{counted(len(self.ranks), 'rank')}, bind {self.bind}, memory {self.memory}"
        return printable_lines("\n".join((head, *(f"  {rank}" for rank in self.ranks))))

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.plan/1)."""
        return {"schema": SCHEMA, **to_json(self)}

    @classmethod
    def from_json(cls, text: str, *, source: str = "JSON") -> Self:
        """Read the JSON form.

        Args:
            text: The JSON text.
            source: The name of the file, for error messages.

        Returns:
            The plan.

        Raises:
            MachineFileError: The text is malformed; the message names `source` and the element.

        Example:
            ```python
            import numapin

            plan = numapin.Plan.from_json(open("plan.json").read(), source="plan.json")
            ```
        """
        return read_record(cls, text, source=source, hint="write a plan with: numapin plan --json", schema=SCHEMA)
