"""`numapin topo`: show the machine. Edge.

Comes in: the machine that the options name. Goes out: a tree, a matrix or JSON on stdout, or a machine file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from numapin.cli.options import GPU_NODES, MACHINE, topology_from
from numapin.cli.output import show, warn
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.topology.model import Topology


def _show_tree(topology: Topology) -> None:
    from numapin.view.topo_tree import topo_tree

    show(topo_tree(topology))
    warn(topology.warnings)


def _show_matrix(topology: Topology) -> None:
    from numapin.view.topo_matrix import topo_matrix

    show(topo_matrix(topology))
    warn(topology.warnings)


def _show_json(topology: Topology) -> None:
    click.echo(_text(topology), nl=False)


_FORMATS: Final[dict[str, Callable[[Topology], None]]] = {
    "tree": _show_tree,
    "matrix": _show_matrix,
    "json": _show_json,
}


@click.command(params=[*MACHINE, GPU_NODES])
@click.option("--format", "form", type=click.Choice(list(_FORMATS)), default="tree", help="How to show it.")
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Write a machine file instead.")
def topo(form: str, save: Path | None, **machine: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Show packages, NUMA nodes, L3 groups, cores, GPUs and NICs of this or another machine.

    \b
    Examples:
      numapin topo                        as a tree
      numapin topo --format matrix        how GPUs and NICs reach each other
      numapin topo --save dgx.json        to plan for this machine elsewhere:
      numapin plan --machine dgx.json
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    topology = topology_from(**machine)
    if save is not None:
        _save(topology, save)
    else:
        _FORMATS[form](topology)


def _text(topology: Topology) -> str:
    return json.dumps(topology.to_json(), indent=1, ensure_ascii=False) + "\n"


def _save(topology: Topology, path: Path) -> None:
    try:
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(_text(topology), encoding="utf-8")
        temporary.replace(path)
    except (OSError, ValueError) as error:  # with_name takes no path that ends in no name
        raise NumapinError(f"{path} cannot be written: {error}", "choose another file for --save") from None
