"""`numapin topo`: show the machine. Edge.

Comes in: the machine that the options name, and a plan if wanted. Goes out: a tree, a matrix, JSON, or a picture (SVG,
HTML) on stdout or in a file; or a machine file.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from numapin.cli.options import GPU_NODES, MACHINE, FilePath, topology_from
from numapin.cli.output import emit, json_text, show, warn, write
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_NEW_PLAN: Final = ""  # what --plan without a file means


def _show_tree(topology: Topology, plan: Plan | None) -> None:
    from numapin.view.topo_tree import topo_tree

    show(topo_tree(topology, plan))
    warn((plan or topology).warnings)


def _show_matrix(topology: Topology, _plan: Plan | None) -> None:
    from numapin.view.topo_matrix import topo_matrix

    show(topo_matrix(topology))
    warn(topology.warnings)


def _show_json(topology: Topology, _plan: Plan | None) -> None:
    emit(json_text(topology.to_json()))


def _svg(topology: Topology, plan: Plan | None) -> str:
    from numapin.view.picture.layout import lay_out
    from numapin.view.picture.svg import svg

    return svg(lay_out(topology, plan))


def _html(topology: Topology, plan: Plan | None) -> str:
    from numapin.view.picture.page import page

    return page(topology, plan)


_SHOWN: Final[dict[str, Callable[[Topology, Plan | None], None]]] = {
    "tree": _show_tree,
    "matrix": _show_matrix,
    "json": _show_json,
}
_DRAWN: Final[dict[str, Callable[[Topology, Plan | None], str]]] = {"svg": _svg, "html": _html}
_PLANNED: Final = ("tree", *_DRAWN)


@click.command(params=[*MACHINE, GPU_NODES])
@click.option("--format", "form", type=click.Choice([*_SHOWN, *_DRAWN]), default="tree", help="Output format.")
@click.option("--json", "form", flag_value="json", help="Same as --format json.")
@click.option(
    "--plan",
    "plan_file",
    is_flag=False,
    flag_value=_NEW_PLAN,
    metavar="[FILE]",
    help="Mark each rank's CPUs, memory and GPU, from a plan.json or from the plan that `numapin plan` would make.",
)
@click.option("--output", type=FilePath(), metavar="FILE", help="Write the svg or html here (default: stdout).")
@click.option("--save", type=FilePath(), metavar="FILE", help="Write a machine file instead of showing the machine.")
def topo(
    form: str,
    plan_file: str | None,
    output: Path | None,
    save: Path | None,
    **machine: Any,  # noqa: ANN401 - click passes options by name
) -> None:
    """Show packages, NUMA nodes, L3 groups, cores, GPUs and NICs of this or another machine.

    \b
    Examples:
      numapin topo                        as a tree
      numapin topo --format matrix        how GPUs and NICs reach each other
      numapin topo --format html --plan --output topo.html
      numapin topo --format svg --plan RUN/plan.json > topo.svg
      numapin topo --save dgx.json        to plan for this machine elsewhere:
      numapin plan --machine dgx.json
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    _check(form, plan_file, output)
    topology = topology_from(**machine)
    if save is not None:
        write(json_text(topology.to_json()), save, option="--save")
        return
    is_this_host = machine["root"] is None and machine["machine"] is None
    plan = None if plan_file is None else _plan(topology, plan_file, is_this_host=is_this_host)
    if form in _SHOWN:
        _SHOWN[form](topology, plan)
        return
    text = _DRAWN[form](topology, plan)
    if output is None:
        emit(text)
    else:
        write(text, output, option="--output")
    warn((plan or topology).warnings)


def _check(form: str, plan_file: str | None, output: Path | None) -> None:
    """Refuse what cannot be combined, and a page of source on a terminal. Raises UsageError."""
    if plan_file is not None and form not in _PLANNED:
        raise UsageError(f"--plan marks nothing with --format {form}", f"use --format {', '.join(_PLANNED)}")
    if output is not None and form in _SHOWN:
        raise UsageError(
            f"--output is for {' and '.join(_DRAWN)}, not for {form}", f"numapin topo --format {form} > FILE"
        )
    if output is None and form in _DRAWN and sys.stdout.isatty():
        hint = f"numapin topo --format {form} --output topo.{form}"
        raise UsageError(f"--format {form} is a picture, and stdout is a terminal", hint)


def _plan(topology: Topology, file: str, *, is_this_host: bool) -> Plan:
    """Read a saved plan, or make the one of `numapin plan`."""
    from numapin.plan.make import default_num_ranks, make_plan
    from numapin.plan.model import Plan
    from numapin.plan.request import Request
    from numapin.tasks.enter import read_plan_file

    if file == _NEW_PLAN:
        return make_plan(topology, Request(num_ranks=default_num_ranks(topology, is_this_host=is_this_host)))
    return Plan.from_json(read_plan_file(file), source=file)
