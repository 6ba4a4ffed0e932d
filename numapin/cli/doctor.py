"""`numapin doctor`: find settings of a machine that make jobs slow or unsafe; changes nothing, needs no root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from numapin.base.cpu_set import CpuSet
from numapin.cli.options import GPU_NODES, MACHINE, MachinePath, Parsed, json_option, topology_from
from numapin.cli.output import emit, json_text, show
from numapin.data.budget import read_room
from numapin.doctor.check import DoctorSeverity, Host
from numapin.doctor.live import read_live
from numapin.doctor.model import IDLE, NAMES, DoctorReport, compare, counts_of, examine, parse_expected, parse_names
from numapin.errors import LibnumaError, UsageError
from numapin.system.tree import Tree
from numapin.topology.discover import discover

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.topology.model import Topology


class _Expected(MachinePath):
    """Counts such as gpus=8, the word idle, or a machine file."""

    def convert(  # type: ignore[override] # counts are no path
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | Mapping[str, int | str]:
        """Return the path of a file that exists or has no "=" in its name, else what is expected."""
        if not value:
            self.fail("is empty; give a machine file, or counts such as gpus=8,nodes=2", param, ctx)
        path = str(super().convert(value, param, ctx))
        if ("=" not in path and path != IDLE) or os.path.exists(path):  # noqa: PTH110 - Path's raises for long names
            return path
        try:
            return parse_expected(path)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(params=[MACHINE[0], GPU_NODES])
@click.option(
    "--only", type=Parsed("CHECK,...", parse_names, words=NAMES, many=True), help="Make these checks only, e.g. nodes."
)
@click.option(
    "--skip",
    type=Parsed("CHECK,...", parse_names, words=NAMES, many=True),
    help="Leave these checks out, e.g. kernel,swap.",
)
@click.option(
    "--expect",
    type=_Expected(),
    multiple=True,
    metavar="FILE|COUNTS",
    help="Report an error unless the machine has exactly what a machine file has (topo --save), or these counts: "
    "sockets, nodes, cores, cpus, gpus, nics, ports, memory, driver, e.g. gpus=8,nics=8,driver=580; or, with the word "
    "idle, if a process computes on a GPU. May be given several times.",
)
@click.option(
    "--fail-on",
    type=click.Choice([each.value for each in DoctorSeverity if each is not DoctorSeverity.OK]),
    default=DoctorSeverity.ERROR.value,
    help="Exit with status 1 from this severity on (default: error).",
)
@json_option("numapin.doctor/1")
def doctor(
    *,
    root: Path | None,
    gpu_nodes: tuple[tuple[str, int], ...] | None,
    only: tuple[str, ...] | None,
    skip: tuple[str, ...] | None,
    expect: tuple[str | Mapping[str, int | str], ...],
    fail_on: str,
    as_json: bool,
) -> None:
    """Find what makes jobs slow or unsafe on this machine, and the command that fixes it. Changes nothing.

    \b
    Examples:
      numapin doctor                          this machine, as this user
      numapin doctor --root capture --json    a captured machine, for scripts
      numapin doctor --only driver,ecc,xid --expect gpus=8,idle --fail-on warning
                                              for the prolog of a batch system

    Exit status: 1 if an error is found (see --fail-on), 3 if the machine cannot be read or numapin fails, else 0.
    """
    if not set(only or NAMES) - set(skip or ()):
        raise UsageError("--skip leaves out each check of --only", "leave one of them out")
    like: Topology | None = None
    expected: dict[str, int | str] = {}
    for each in expect:
        if isinstance(each, str):
            like = discover(machine=each)
            expected |= counts_of(like)
        else:
            expected |= each
    must_be_idle = expected.pop(IDLE, None) is not None
    if must_be_idle and root:
        raise UsageError("--expect idle needs the running machine", "leave out --root")
    if must_be_idle and "gpu-processes" in (skip or ()):
        problem = "--expect idle needs the check gpu-processes, which --skip leaves out"
        raise UsageError(problem, "leave one of them out")
    try:
        topology = topology_from(gpu_nodes=gpu_nodes, root=root)
    except LibnumaError:  # a finding, so the machine's files are read without it
        topology = discover(root=Path("/"), gpu_nodes=gpu_nodes or ())
    folder = root or Path("/")
    live = None if root else read_live(topology, os.environ, must_be_idle=must_be_idle)
    host = Host(tree=Tree(os.fspath(folder).rstrip("/")), topology=topology, live=live, must_be_idle=must_be_idle)
    findings = examine(host, only=only or NAMES, skip=skip or ())
    if expected:
        findings = (*compare(host, expected, like=like), *findings)
    gpus = topology.visible_gpus
    nodes = CpuSet(gpu.node for gpu in gpus if gpu.node is not None)
    report = DoctorReport(
        host=topology.host,
        source=topology.source,
        findings=findings,
        room=read_room(folder, nodes=nodes, num_ranks=max(1, len(gpus))),
    )
    if as_json:
        emit(json_text(report.to_json()))
    else:
        from numapin.view.doctor_table import doctor_table

        show(doctor_table(report))
    click.get_current_context().exit(1 if report.has(DoctorSeverity(fail_on)) else 0)
