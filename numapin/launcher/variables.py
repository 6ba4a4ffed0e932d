"""Stage 3: the variables that torchrun sets for ranks. Pure.

Comes in: the facts of a job on one host. Goes out: environment variables, under torchrun's names. Where torch's agent
starts the ranks, it sets them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def job_variables(
    num_ranks: int,
    *,
    address: str,
    port: int,
    run_id: str,
    role: str = "default",
    launcher_has_store: bool,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of all ranks of a host without restarts.

    Args:
        num_ranks: The number of ranks.
        address: The address of the ranks' store.
        port: Its port.
        run_id: The id of the run.
        role: The name of the ranks' role.
        launcher_has_store: Whether the launcher serves the store; otherwise rank 0 does.
        environ: The launcher's environment.
    """
    return {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(num_ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": role,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(launcher_has_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def rank_variables(local_rank: int) -> dict[str, str]:
    """Return the variables of one rank of a job on one host."""
    return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(local_rank))


def virtual_rank_variables(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what --virtual-local-rank sets: local rank 0, and a CUDA_VISIBLE_DEVICES with the rank's GPU only.

    Raises IndexError if CUDA_VISIBLE_DEVICES has no entry for this rank.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    gpu = str(local_rank) if listed is None else listed.split(",")[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu}
