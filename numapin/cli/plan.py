"""`numapin plan`: what `numapin run` would bind. Edge.

Comes in: the machine and the binding options. Goes out: the plan as a table with reasons, JSON, or shell lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from numapin.base.bounds import MAX_RANKS
from numapin.cli.options import BINDING, MACHINE, BindingOptions, topology_from
from numapin.cli.output import emit, json_text, show, warn
from numapin.plan.make import default_num_ranks, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numapin.plan.model import Plan


def _show_table(plan: Plan) -> None:
    from numapin.view.plan_table import plan_table

    show(plan_table(plan, reasons=True))


def _show_json(plan: Plan) -> None:
    emit(json_text(plan.to_json()))


def _show_environment(plan: Plan) -> None:
    from numapin.view.plan_table import environment_lines

    emit("".join(f"{line}\n" for line in environment_lines(plan)))


_FORMATS: Final[dict[str, Callable[[Plan], None]]] = {
    "table": _show_table,
    "json": _show_json,
    "env": _show_environment,
}


_RANKS: Final = f"Number of ranks, at most {MAX_RANKS} (default: one per visible GPU)."


@click.command(params=[*BINDING, *MACHINE])
@click.option("--nproc-per-node", type=click.IntRange(1, MAX_RANKS), metavar="N", help=_RANKS)
@click.option("--format", "form", type=click.Choice(list(_FORMATS)), default="table", help="Output format.")
@click.option("--json", "form", flag_value="json", help="Same as --format json.")
def plan(form: str, nproc_per_node: int | None, root: Path | None, machine: Path | None, **binding: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Show which CPUs and which memory each rank would get, and why. Starts nothing.

    \b
    Examples:
      numapin plan                                   for this machine
      numapin plan --machine dgx.json --bind socket  for another one
      numapin plan --machine example:dgx-a100        for a built-in one (numapin topo --machine example:)
      numapin plan --nproc-per-node 4 --json         for scripts
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    options = BindingOptions(**binding)
    topology = topology_from(gpu_nodes=options.gpu_nodes, root=root, machine=machine)
    num_ranks = nproc_per_node or default_num_ranks(topology, is_this_host=root is None and machine is None)
    made = make_plan(topology, options.request(num_ranks=num_ranks))
    _FORMATS[form](made)
    warn(made.warnings)
    if options.strict:
        made.require_exact()
