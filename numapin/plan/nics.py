"""Stage 2: the NIC of each rank, and the variables that name it to UCX and NVSHMEM. Pure.

Comes in: the nearest NICs of each GPU, which were dealt out once for the whole host, and the libraries of --nic-env.
Goes out: a rank's NICs with the reason, and the environment variables of its process.

UCX takes a list of `DEVICE:PORT` (UCX_NET_DEVICES; `ucx_info -c -f`, src/ucp/core/ucp_context.c). NVSHMEM takes such a
list, too (NVSHMEM_HCA_LIST), but only as a filter: it keeps its own order of devices, and with
NVSHMEM_ENABLE_NIC_PE_MAPPING=1 process n of the host takes device n of the rest
(https://docs.nvidia.com/nvshmem/api/gen/env.html; nvshmemi_setup_connections in its source). Some programs number the
processes of a host wrongly there, and all of them get the first NIC (https://github.com/deepseek-ai/DeepEP/issues/336).
So a rank's list has only its own NIC, which leaves no choice.

NCCL_IB_HCA is never set: NCCL chooses NICs itself, and needs the same value on all ranks
(https://github.com/NVIDIA/nccl/issues/1478, https://github.com/NVIDIA/nccl/issues/2428).
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base.plural import listed
from numapin.errors import UsageError
from numapin.plan.request import NicLibrary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numapin.plan.cpus import Draft
    from numapin.plan.model import Plan, RankPlan
    from numapin.plan.request import Request
    from numapin.topology.nearest_nics import NearestNics

_OURS: Final = "NUMAPIN_NIC_ENV"
"""The names of the other variables, joined by colons. What a rank starts inherits them, and may replace them."""
_PORT: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_SETTINGS: Final[dict[NicLibrary, Callable[[str], dict[str, str]]]] = {
    NicLibrary.UCX: lambda device: {"UCX_NET_DEVICES": device},
    NicLibrary.NVSHMEM: lambda device: {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1", "NVSHMEM_HCA_LIST": device},
}
_DECIDED_BY: Final = {
    NicLibrary.UCX: ("UCX_NET_DEVICES",),
    NicLibrary.NVSHMEM: ("NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING"),
}
"""The variables of each library by which a user chooses NICs."""


def with_nic_doubts(draft: Draft, request: Request, nearest: Mapping[int, NearestNics]) -> Draft:
    """Mark a rank as not exact if --nic-env asks for its NIC and none is known."""
    if not request.nic_env or (draft.gpu is not None and draft.gpu.index in nearest):
        return draft
    missing = "no GPU is known" if draft.gpu is None else "no RDMA NIC is known near its GPU"
    return draft.because(f"--nic-env {','.join(request.nic_env)} sets nothing: {missing}", exact=False)


def with_nics(rank: RankPlan, request: Request, nearest: Mapping[int, NearestNics]) -> RankPlan:
    """Return the rank with the NICs of its GPU."""
    found = None if rank.gpu is None else nearest.get(rank.gpu.index)
    if found is None:
        return rank
    return replace(rank, nics=found.names, nics_reason=found.reason, nic_env=request.nic_env)


def nic_variables(rank: RankPlan) -> dict[str, str]:
    """Return the variables that name the rank's own NIC to the libraries of --nic-env.

    Raises UsageError for a name that no NIC has: plans come from files, too.
    """
    if not rank.nics or not rank.nic_env:
        return {}
    nic = rank.nics[0]
    if not _NAME.fullmatch(nic):
        raise UsageError(f"the plan names {nic[:60]!r} as the NIC of rank {rank.local_rank}", "make the plan again")
    device = f"{nic}:{_PORT}"
    return {name: value for library in rank.nic_env for name, value in _SETTINGS[library](device).items()}


def exported(rank: RankPlan) -> dict[str, str]:
    """Return the variables of a rank's process: those of `nic_variables`, and one that says that they are ours."""
    variables = nic_variables(rank)
    return {**variables, _OURS: ":".join(variables)} if variables else {}


def with_users_nics(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """Return the plan without libraries for which the user has chosen NICs, and with a warning about each choice."""
    ranks, kept = without_users(plan.ranks, environ)
    return replace(plan, ranks=ranks, warnings=(*plan.warnings, *kept))


def without_users(
    ranks: Iterable[RankPlan], environ: Mapping[str, str]
) -> tuple[tuple[RankPlan, ...], tuple[str, ...]]:
    """Return the ranks without libraries for which the user has chosen other NICs, and a message about each choice."""
    chosen = _set_by_user(environ)
    kept: dict[str, list[int]] = {}
    left = []
    for rank in ranks:
        users = _users_choices(rank, chosen)
        for name in chain.from_iterable(users.values()):
            kept.setdefault(name, []).append(rank.local_rank)
        left.append(replace(rank, nic_env=tuple(library for library, names in users.items() if not names)))
    return tuple(left), tuple(_kept_message(name, chosen[name], numbers) for name, numbers in kept.items())


def _set_by_user(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that numapin has not set."""
    ours = environ.get(_OURS, "").split(":")
    return {name: value for name, value in environ.items() if name not in ours}


def _users_choices(rank: RankPlan, chosen: Mapping[str, str]) -> dict[NicLibrary, list[str]]:
    """Return the variables of each of the rank's libraries that the user has set to something else."""
    wanted = nic_variables(rank)
    return {library: _differing(library, wanted, chosen) for library in rank.nic_env or ()}


def _differing(library: NicLibrary, wanted: Mapping[str, str], chosen: Mapping[str, str]) -> list[str]:
    """Return the library's variables that the user has set to something else."""
    return [name for name in _DECIDED_BY[library] if name in chosen and chosen[name] != wanted.get(name)]


def _kept_message(name: str, value: str, ranks: list[int]) -> str:
    return f"{name}={value[:60]} is set and stays: --nic-env does not change it for {listed('rank', ranks)}"
