"""`numapin plan`: show what `numapin run` would bind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from numapin.base.bounds import MAX_RANKS
from numapin.cli.options import BINDING, MACHINE, BindingOptions, json_option, record_of, topology_from
from numapin.cli.output import emit, json_text, show, warn
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.nics import with_users_nics

if TYPE_CHECKING:
    from pathlib import Path

_RANKS: Final = click.Option(
    ["--nproc-per-node"],
    type=click.IntRange(1, MAX_RANKS),
    metavar="N",
    help=f"Number of ranks, at most {MAX_RANKS} (default: one per visible GPU).",
)


@click.command(params=[*BINDING, *MACHINE, _RANKS], context_settings={"allow_interspersed_args": False})
@json_option("numapin.plan/1")
def plan(
    *, as_json: bool, nproc_per_node: int | None, root: Path | None, machine: Path | None, **binding: object
) -> None:
    """Show which CPUs and which memory each rank would get, and why. Starts nothing.

    \b
    Examples:
      numapin plan                                   for this machine
      numapin plan --machine dgx.json --bind socket  for a saved machine
      numapin plan --machine example:dgx-a100        for a built-in machine
      numapin plan --nproc-per-node 4 --json         for scripts
    """
    options = record_of(BindingOptions, binding)
    topology = topology_from(gpu_nodes=options.gpu_nodes, root=root, machine=machine)
    is_this_host = root is None and machine is None
    num_ranks = nproc_per_node or default_num_ranks(topology, is_this_host=is_this_host)
    made = make_plan(topology, options.request(num_ranks=num_ranks))
    if is_this_host:
        made = with_users_nics(made, os.environ)
    if as_json:
        emit(json_text(made.to_json()))
        warn(made.warnings)
    else:
        from numapin.view.plan_table import explained_plan, other_warnings

        show(explained_plan(made))
        warn(other_warnings(made))
    if options.strict:
        made.require_exact()
