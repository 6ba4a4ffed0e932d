"""The facts that a machine's description leaves open, and the ranks whose plan depends on them. Pure.

Comes in: a rank's `Draft` with its CPUs. Goes out: the same, with a shortfall for each such fact: a plan that stands on
an assumption is not exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.plan.request import Bind, Memory

if TYPE_CHECKING:
    from numapin.plan.cpus import Draft
    from numapin.plan.request import Request
    from numapin.plan.usable import UsableMachine
    from numapin.topology.model import Topology

_OF_HOME: Final = (Memory.PREFERRED, Memory.BIND)
"""Policies that take the memory of a rank's node."""
_ORDER: Final = "the order of the GPUs is assumed, so the rank may use another GPU"
_ALLOWED: Final = "it is unknown which CPUs and nodes may be used, so all count as allowed"
_SIBLINGS: Final = "which CPUs share a core is unknown, so ranks may share cores; two threads per core are assumed"


def with_doubts(machine: UsableMachine, request: Request, draft: Draft) -> Draft:
    """Mark a rank as not exact if the machine's description leaves open what its CPUs or its memory are."""
    topology = machine.topology
    if _depends_on_home(request, draft):
        draft = _with_doubts_about_home(topology, draft)
    if not topology.allowed_known:
        draft = draft.because(_ALLOWED, exact=False)
    if topology.siblings_known:
        return draft
    return draft._replace(num_threads=max(1, draft.num_threads // 2)).because(_SIBLINGS, exact=False)


def _with_doubts_about_home(topology: Topology, draft: Draft) -> Draft:
    if draft.home in topology.doubtful_nodes:
        draft = draft.because(f"it is uncertain which CPUs belong to node {draft.home}", exact=False)
    if draft.gpu is None or topology.gpu_order_known:
        return draft
    return draft.because(_ORDER, exact=False)


def _depends_on_home(request: Request, draft: Draft) -> bool:
    """Return whether the rank's CPUs or its memory are those of its node."""
    takes_memory = request.policy in _OF_HOME and request.memory_nodes is None
    return draft.bound or (request.bind is Bind.NONE and takes_memory)
