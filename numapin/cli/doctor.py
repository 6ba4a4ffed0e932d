"""`numapin doctor`: what on this machine keeps a job from being fast or safe. Edge.

Comes in: this machine or a captured one, and the numbers of a loader. Goes out: findings as a table or JSON, and status
1 where one of them is an error. Nothing is changed, and nothing needs root.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numapin.base import sizes
from numapin.base.cpu_set import CpuSet
from numapin.cli.options import GPU_NODES, MACHINE, Parsed, topology_from
from numapin.cli.output import emit, json_text, show
from numapin.data.budget import read_room
from numapin.doctor.advice import Loader, advise
from numapin.doctor.examine import examine
from numapin.doctor.files import read_files
from numapin.doctor.live import read_live
from numapin.doctor.model import DoctorReport
from numapin.errors import LibnumaError
from numapin.topology.discover import discover

if TYPE_CHECKING:
    from numapin.topology.model import Topology


@click.command(params=[MACHINE[0], GPU_NODES])
@click.option(
    "--batch-bytes",
    type=Parsed("SIZE", sizes.parse),
    help="Batch size of a rank, e.g. 38.5M: advise whether to pin it.",
)
@click.option(
    "--workers", type=click.IntRange(min=0), default=4, show_default=True, help="DataLoader workers per rank."
)
@click.option(
    "--prefetch-factor",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Batches that each worker prepares ahead.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema numapin.doctor/1).")
def doctor(root: Path | None, **given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Find what makes jobs slow or unsafe on this machine, and the command that fixes it. Changes nothing.

    \b
    Examples:
      numapin doctor                                  this machine, as this user
      numapin doctor --workers 8 --batch-bytes 38.5M  and whether that loader should pin
      numapin doctor --root capture --json            a captured machine, for scripts

    Exit status: 1 where there is an error, else 0.
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    topology = _topology(root, given["gpu_nodes"])
    live = None if root else read_live(topology, os.environ)
    readings = read_files(root or Path("/"), topology, live=live)
    gpus = topology.visible_gpus
    loader, num_ranks = None, max(1, len(gpus))
    if given["batch_bytes"] is not None:
        loader = Loader(
            num_workers=given["workers"],
            prefetch_factor=given["prefetch_factor"],
            batch_bytes=given["batch_bytes"],
            num_ranks=num_ranks,
        )
    nodes = CpuSet(gpu.node for gpu in gpus if gpu.node is not None)
    room = read_room(root or Path("/"), nodes=nodes, num_ranks=num_ranks)
    shm_free_bytes = live.shm_free_bytes if live else None
    report = DoctorReport(
        host=topology.host,
        source=topology.source,
        findings=examine(readings, topology),
        advice=advise(loader, room, num_gpus=len(gpus), shm_free_bytes=shm_free_bytes),
    )
    _print(report, as_json=given["as_json"])
    click.get_current_context().exit(1 if report.has_errors else 0)


def _topology(root: Path | None, gpu_nodes: tuple[tuple[str, int], ...] | None) -> Topology:
    """Read the machine; without libnuma, which is a finding and not the end, what its files tell."""
    try:
        return topology_from(gpu_nodes=gpu_nodes, root=root)
    except LibnumaError:
        return discover(root=Path("/"), gpu_nodes=gpu_nodes or ())


def _print(report: DoctorReport, *, as_json: bool) -> None:
    if as_json:
        emit(json_text(report.to_json()))
        return
    from numapin.view.doctor_table import doctor_table

    show(doctor_table(report))
