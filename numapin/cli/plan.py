"""`numapin plan`: what `numapin run` would bind. Edge.

Comes in: the machine and the binding options. Goes out: the plan as a table with reasons, JSON, or shell lines.
"""

from __future__ import annotations

import json
from typing import Any

import click

from numapin.cli.options import BINDING, MACHINE, request_from, topology_from, with_options
from numapin.cli.output import show, warn
from numapin.errors import BindingRefused
from numapin.plan import make_plan


@with_options([*BINDING, *MACHINE])
@click.command(short_help="Show what run would bind.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N", help="Ranks; default: one per visible GPU.")
@click.option("--format", "form", type=click.Choice(["table", "json", "env"]), default="table", help="How to show it.")
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
def plan(form: str, nproc_per_node: int | None, **values: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Show which CPUs and which memory each rank would get, and why, without starting anything.

    \b
    Examples:
      numapin plan                                   for this machine
      numapin plan --machine dgx.json --bind socket  for another one
      numapin plan --nproc-per-node 4 --json         for scripts
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    made = make_plan(topology_from(values), request_from(values, num_ranks=nproc_per_node))
    if form == "json":
        click.echo(json.dumps(made.to_json(), indent=1, ensure_ascii=False))
    elif form == "env":
        from numapin.view.plan_table import environment_lines

        click.echo("\n".join(environment_lines(made)))
    else:
        from numapin.view.plan_table import plan_table

        show(plan_table(made, reasons=True))
    warn(made.warnings)
    if values["strict"] and not made.exact:
        inexact = next(rank for rank in made.ranks if not rank.exact)
        raise BindingRefused(f"--strict: rank {inexact.local_rank}: {inexact.reason}", "without --strict it would run")
