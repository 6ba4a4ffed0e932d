"""The reasons that `numapin run --verbose` prints below the table of bindings.

The reasons for the bindings are in the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.plural import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numapin.launcher.options import Job
    from numapin.plan.model import Plan


def decisions(job: Job, plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each decision that is not about a rank's CPUs and memory."""
    yield f"{counted(len(plan.ranks), 'rank')} on this host: {_why_so_many(job, plan)}"
    yield f"ranks meet {_where(job)}"
    threads = environ.get("OMP_NUM_THREADS")
    yield f"OMP_NUM_THREADS: {'its share of the cores for each rank' if threads is None else f'{threads} was set'}"


def _why_so_many(job: Job, plan: Plan) -> str:
    if job.nproc_per_node is not None:
        return f"--nproc-per-node {job.nproc_per_node}"
    return "one per visible GPU" if any(rank.gpu for rank in plan.ranks) else "no GPU is visible"


def _where(job: Job) -> str:
    if job.is_single_host:
        return "without a rendezvous, because the job has one host"
    return f"through the rendezvous of several hosts: {job.rdzv_backend} at {job.rdzv_endpoint}"
