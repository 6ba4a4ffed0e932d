"""The variables that name each rank's own NIC to UCX and NVSHMEM (--nic-env).

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
from typing import TYPE_CHECKING, Final

from numapin.base.text import listed
from numapin.errors import UsageError
from numapin.plan.request import NicLibrary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.plan.model import Plan, RankPlan

OURS: Final = "NUMAPIN_NIC_ENV"
"""The names of the other variables, joined by colons. What a rank starts inherits them, and may replace them."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_VARIABLES: Final = {
    NicLibrary.UCX: {"UCX_NET_DEVICES": "{device}"},
    NicLibrary.NVSHMEM: {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1", "NVSHMEM_HCA_LIST": "{device}"},
}
_DECIDED_BY: Final = {
    NicLibrary.UCX: ("UCX_NET_DEVICES",),
    NicLibrary.NVSHMEM: ("NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING"),
}
"""The variables of each library by which a user chooses NICs."""


def nic_variables(rank: RankPlan) -> dict[str, str]:
    """Return the variables that name the rank's own NIC to the libraries of --nic-env.

    Raises UsageError for a name that no NIC has: plans come from files, too.
    """
    if not rank.nics or not rank.nic_env:
        return {}
    nic = rank.nics[0]
    if not _NAME.fullmatch(nic):
        raise UsageError(f"the plan names {nic[:60]!r} as the NIC of rank {rank.local_rank}", "make the plan again")
    device = f"{nic}:1"  # its first port
    return {name: text.format(device=device) for lib in rank.nic_env for name, text in _VARIABLES[lib].items()}


def exported(rank: RankPlan) -> dict[str, str]:
    """Return the variables of a rank's process: those of `nic_variables`, and one that says that they are ours."""
    variables = nic_variables(rank)
    return {**variables, OURS: ":".join(variables)} if variables else {}


def with_users_nics(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """Return the plan without libraries for which the user has chosen NICs, and with a warning about each choice."""
    ranks, kept = without_users(plan.ranks, environ)
    return replace(plan, ranks=ranks, warnings=(*plan.warnings, *kept))


def without_users(
    ranks: Iterable[RankPlan], environ: Mapping[str, str]
) -> tuple[tuple[RankPlan, ...], tuple[str, ...]]:
    """Return the ranks without libraries for which the user has chosen other NICs, and a message about each choice."""
    ours = environ.get(OURS, "").split(":")
    chosen = {name: value for name, value in environ.items() if name not in ours}
    ranks_by_variable: dict[str, list[int]] = {}
    left = []
    for rank in ranks:
        wanted, libraries = nic_variables(rank), []
        for library in rank.nic_env or ():
            differing = [name for name in _DECIDED_BY[library] if name in chosen and chosen[name] != wanted.get(name)]
            for name in differing:
                ranks_by_variable.setdefault(name, []).append(rank.local_rank)
            if not differing:
                libraries.append(library)
        left.append(replace(rank, nic_env=tuple(libraries)))
    kept = (
        f"{name}={chosen[name][:60]} is set and stays: --nic-env does not change it for {listed('rank', numbers)}"
        for name, numbers in ranks_by_variable.items()
    )
    return tuple(left), tuple(kept)
