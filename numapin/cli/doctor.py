"""`numapin doctor`: find settings of a machine that make jobs slow or unsafe.

Changes nothing, and does not need root.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click

from numapin.base.cpu_set import CpuSet
from numapin.cli.options import GPU_NODES, MACHINE, json_option, topology_from
from numapin.cli.output import emit, json_text, show
from numapin.data.budget import read_room
from numapin.doctor.check import Host
from numapin.doctor.live import read_live
from numapin.doctor.model import DoctorReport, examine
from numapin.errors import LibnumaError, UsageError
from numapin.system.tree import Tree
from numapin.topology.discover import discover


def _refuse_machine(_ctx: click.Context, _option: click.Parameter, value: str | None) -> None:
    """Raise UsageError for --machine, which other commands have."""
    if value is not None:
        raise UsageError(
            f"--machine {value}: a machine file does not have the settings that doctor examines",
            "doctor examines this host, or a capture: --root DIR",
        )


_NO_MACHINE: Final = click.Option(["--machine"], hidden=True, expose_value=False, callback=_refuse_machine)


@click.command(params=[MACHINE[0], GPU_NODES, _NO_MACHINE])
@json_option("numapin.doctor/1")
def doctor(root: Path | None, gpu_nodes: tuple[tuple[str, int], ...] | None, *, as_json: bool) -> None:
    """Find what makes jobs slow or unsafe on this machine, and the command that fixes it. Changes nothing.

    \b
    Examples:
      numapin doctor                          this machine, as this user
      numapin doctor --root capture --json    a captured machine, for scripts

    Exit status: 1 if an error is found, else 0.
    """
    try:
        topology = topology_from(gpu_nodes=gpu_nodes, root=root)
    except LibnumaError:  # a finding, so the machine's files are read without it
        topology = discover(root=Path("/"), gpu_nodes=gpu_nodes or ())
    folder = root or Path("/")
    live = None if root else read_live(topology, os.environ)
    gpus = topology.visible_gpus
    nodes = CpuSet(gpu.node for gpu in gpus if gpu.node is not None)
    report = DoctorReport(
        host=topology.host,
        source=topology.source,
        findings=examine(Host(tree=Tree(os.fspath(folder).rstrip("/")), topology=topology, live=live)),
        room=read_room(folder, nodes=nodes, num_ranks=max(1, len(gpus))),
    )
    if as_json:
        emit(json_text(report.to_json()))
    else:
        from numapin.view.doctor_table import doctor_table

        show(doctor_table(report))
    click.get_current_context().exit(1 if report.has_errors else 0)
