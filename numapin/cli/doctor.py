"""`numapin doctor`: find settings of a machine that make jobs slow or unsafe. Edge.

Comes in: this machine or a captured one, and a loader's settings. Goes out: findings as a table or JSON, and status 1
if one of them is an error. Changes nothing, and does not need root.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from numapin.base import sizes
from numapin.base.cpu_set import CpuSet
from numapin.cli.options import GPU_NODES, MACHINE, Parsed, topology_from, with_values
from numapin.cli.output import emit, json_text, show
from numapin.data.budget import read_room
from numapin.doctor.advice import Loader, advise
from numapin.doctor.check import Host
from numapin.doctor.live import read_live
from numapin.doctor.model import DoctorReport, examine
from numapin.doctor.script import remedy_script
from numapin.errors import LibnumaError, UsageError
from numapin.system.tree import Tree
from numapin.topology.discover import discover

if TYPE_CHECKING:
    from numapin.topology.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class _DoctorOptions:
    """The parsed values of this command's options, by click's names."""

    root: Path | None
    gpu_nodes: tuple[tuple[str, int], ...] | None
    batch_bytes: int | None
    workers: int
    prefetch_factor: int
    as_json: bool
    script: bool


def _refuse_machine(_ctx: click.Context, _option: click.Parameter, value: str | None) -> None:
    """Raise UsageError for --machine, which other commands have."""
    if value is not None:
        raise UsageError(
            f"--machine {value}: a machine file does not have the settings that doctor examines",
            "doctor examines this host, or a capture: --root DIR",
        )


_NO_MACHINE: Final = click.Option(["--machine"], hidden=True, expose_value=False, callback=_refuse_machine)


@click.command(params=[MACHINE[0], GPU_NODES, _NO_MACHINE])
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
@click.option(
    "--script", is_flag=True, help="Print all remedies as a shell script to review and run. Remedies that are not "
    "commands become comments."
)  # fmt: skip
@with_values(_DoctorOptions)
def doctor(options: _DoctorOptions) -> None:
    """Find what makes jobs slow or unsafe on this machine, and the command that fixes it. Changes nothing.

    \b
    Examples:
      numapin doctor                                  this machine, as this user
      numapin doctor --workers 8 --batch-bytes 38.5M  and whether that loader should pin
      numapin doctor --root capture --json            a captured machine, for scripts
      numapin doctor --script > remedies.sh           all remedies, to review and then run

    Exit status: 1 if an error is found, else 0.
    """
    if options.script and options.as_json:
        raise UsageError("--script and --json cannot be combined", "numapin doctor --script > remedies.sh")
    report = _report(options, _topology(options))
    _print(report, options)
    click.get_current_context().exit(1 if report.has_errors else 0)


def _topology(options: _DoctorOptions) -> Topology:
    """Read the machine. A missing libnuma is a finding, so fall back to the machine's files."""
    try:
        return topology_from(gpu_nodes=options.gpu_nodes, root=options.root)
    except LibnumaError:
        return discover(root=Path("/"), gpu_nodes=options.gpu_nodes or ())


def _report(options: _DoctorOptions, topology: Topology) -> DoctorReport:
    """Examine the machine, and the loader if --batch-bytes describes one."""
    root = options.root or Path("/")
    live = None if options.root else read_live(topology, os.environ)
    gpus = topology.visible_gpus
    num_ranks = max(1, len(gpus))
    nodes = CpuSet(gpu.node for gpu in gpus if gpu.node is not None)
    room = read_room(root, nodes=nodes, num_ranks=num_ranks)
    shm_free_bytes = live.shm_free_bytes if live else None
    return DoctorReport(
        host=topology.host,
        source=topology.source,
        findings=examine(Host(tree=Tree(os.fspath(root).rstrip("/")), topology=topology, live=live)),
        advice=advise(_loader(options, num_ranks), room, num_gpus=len(gpus), shm_free_bytes=shm_free_bytes),
    )


def _loader(options: _DoctorOptions, num_ranks: int) -> Loader | None:
    if options.batch_bytes is None:
        return None
    return Loader(
        num_workers=options.workers,
        prefetch_factor=options.prefetch_factor,
        batch_bytes=options.batch_bytes,
        num_ranks=num_ranks,
    )


def _print(report: DoctorReport, options: _DoctorOptions) -> None:
    if options.script:
        emit(remedy_script(report))
        return
    if options.as_json:
        emit(json_text(report.to_json()))
        return
    from numapin.view.doctor_table import doctor_table

    show(doctor_table(report))
