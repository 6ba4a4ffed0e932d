"""`numapin topo`: show the machine. Edge.

Comes in: the machine that the options name. Goes out: a tree, a matrix or JSON on stdout, or a machine file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numapin.cli.options import BINDING, MACHINE, topology_from, with_options
from numapin.cli.output import show, warn
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from numapin.topology.model import Topology


@with_options([*MACHINE, *(option for option in BINDING if option.name == "gpu_nodes")])
@click.command(short_help="Show the machine.")
@click.option("--format", "form", type=click.Choice(["tree", "matrix", "json"]), default="tree", help="How to show it.")
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Write a machine file instead.")
def topo(form: str, save: Path | None, **values: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Show packages, NUMA nodes, L3 groups, cores, GPUs and NICs of this or another machine.

    \b
    Examples:
      numapin topo                        as a tree
      numapin topo --format matrix        how GPUs and NICs reach each other
      numapin topo --save dgx.json        to plan for this machine elsewhere:
      numapin plan --machine dgx.json
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    topology = topology_from(values)
    if save is not None:
        _save(topology, save)
    elif form == "json":
        click.echo(json.dumps(topology.to_json(), indent=1, ensure_ascii=False))
    else:
        _show(topology, form)
        warn(topology.notes)


def _show(topology: Topology, form: str) -> None:
    if form == "matrix":
        from numapin.view.topo_matrix import topo_matrix

        show(topo_matrix(topology))
    else:
        from numapin.view.topo_tree import topo_tree

        show(topo_tree(topology))


def _save(topology: Topology, path: Path) -> None:
    text = json.dumps(topology.to_json(), indent=1, ensure_ascii=False) + "\n"
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise NumapinError(f"{path} cannot be written: {error.strerror}", "choose another file for --save") from None
