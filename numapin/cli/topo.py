"""`numapin topo`: show the machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import click

from numapin.cli.options import GPU_NODES, MACHINE, FilePath, run_names, topology_from
from numapin.cli.output import emit, is_terminal, json_text, show, warn, width_of_stdout, write
from numapin.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from numapin.plan.model import Plan

_NEW_PLAN: Final = ""  # the value of --plan without a file
_SHOWN: Final = ("tree", "matrix", "json")
_DRAWN: Final = ("svg", "html")
_PLANNED: Final = ("tree", *_DRAWN)


@click.command(params=[*MACHINE, GPU_NODES])
@click.option("--format", "form", type=click.Choice((*_SHOWN, *_DRAWN)), help="Output format (default: tree).")
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
@click.option(
    "--plan",
    "plan_file",
    is_flag=False,
    flag_value=_NEW_PLAN,
    metavar="[FILE]",
    shell_complete=run_names(are_live=False),
    help="Mark each rank's CPUs, memory and GPU, from a plan.json, from a run (@last: the newest one), or from the "
    "plan that `numapin plan` would make.",
)
@click.option("--output", type=FilePath(), help="Write the svg or html here (default: stdout).")
@click.option("--save", type=FilePath(), help="Write a machine file instead of showing the machine.")
def topo(
    *,
    root: Path | None,
    machine: Path | None,
    gpu_nodes: tuple[tuple[str, int], ...] | None,
    form: str | None,
    as_json: bool,
    plan_file: str | None,
    output: Path | None,
    save: Path | None,
) -> None:
    """Show sockets, NUMA nodes, PCIe switches, GPUs and NICs of this or another machine.

    \b
    Examples:
      numapin topo                        as a tree
      numapin topo --format matrix        how GPUs and NICs reach each other
      numapin topo --format html --plan --output topo.html
      numapin topo --format svg --plan @last > topo.svg
      numapin topo --save dgx.json        to plan for this machine elsewhere:
      numapin plan --machine dgx.json
      numapin topo --machine example:dgx-a100
    """
    if save and (form or as_json or plan_file is not None or output):
        raise UsageError(
            "--save writes a machine file only, so --format, --json, --output and --plan have no effect",
            "run numapin topo once with --save, and once without",
        )
    if as_json and form not in (None, "json"):
        raise UsageError(f"--json and --format {form} contradict each other", "give one of them")
    form = "json" if as_json else form or "tree"
    if plan_file is not None and form not in _PLANNED:
        raise UsageError(f"--format {form} does not show a plan", f"use --format {', '.join(_PLANNED)}")
    if output is not None and form in _SHOWN:
        raise UsageError(
            f"--output is for {' and '.join(_DRAWN)}, not for {form}", f"numapin topo --format {form} > FILE"
        )
    if output is None and form in _DRAWN and is_terminal(sys.stdout):
        hint = f"numapin topo --format {form} --output topo.{form}"
        raise UsageError(f"--format {form} is a picture, and stdout is a terminal", hint)
    topology = topology_from(gpu_nodes=gpu_nodes, root=root, machine=machine)
    if save is not None:
        write(json_text(topology.to_json()), save, option="--save")
        return
    plan: Plan | None = None
    if plan_file == _NEW_PLAN:
        from numapin.plan.make import default_num_ranks, make_plan
        from numapin.plan.request import Request

        num_ranks = default_num_ranks(topology, is_this_host=root is None and machine is None)
        plan = make_plan(topology, Request(num_ranks=num_ranks))
    elif plan_file is not None:
        from numapin.plan.model import Plan
        from numapin.tasks.enter import plan_path, read_plan_file

        path = plan_path(plan_file, os.environ)
        plan = Plan.from_json(read_plan_file(path), source=path)
    match form:
        case "json":
            emit(json_text(topology.to_json()))
            return
        case "tree":
            from numapin.view.topo_tree import topo_tree

            show(topo_tree(topology, plan))
        case "matrix":
            from numapin.view.topo_matrix import topo_matrix

            show(topo_matrix(topology, width=width_of_stdout()))
        case _:
            if form == "svg":
                from numapin.view.picture import svg as drawn
            else:
                from numapin.view.page import page as drawn
            write(drawn(topology, plan), output, option="--output")
    warn((plan or topology).warnings)
