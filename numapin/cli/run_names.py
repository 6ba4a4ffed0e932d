"""Names of this user's runs, for completion."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click
    from click.shell_completion import CompletionItem


def live_run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of active runs, with their commands, and folders."""
    from click.shell_completion import CompletionItem

    from numapin.launcher.run_folder import live_runs

    del ctx, param
    return [*_items(live_runs(os.environ), incomplete), CompletionItem(incomplete, type="dir")]


def all_run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of active and of left runs, the newest first, and files."""
    from click.shell_completion import CompletionItem

    from numapin.launcher.run_folder import all_runs

    del ctx, param
    newest_first = all_runs(os.environ)[::-1]
    return [*_items(newest_first, incomplete), CompletionItem(incomplete, type="file")]


def _items(folders: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Return the names of runs, and of the last one, that begin as typed."""
    from click.shell_completion import CompletionItem

    from numapin.launcher.run_folder import LAST

    paths = [Path(folder) for folder in folders]
    last = [CompletionItem(LAST, help="the newest run")] if paths and LAST.startswith(incomplete) else []
    return [
        *last,
        *(CompletionItem(path.name, help=_command(path)) for path in paths if path.name.startswith(incomplete)),
    ]


def _command(folder: Path) -> str:
    """Return the command line of a run; "" if it cannot be read."""
    from numapin.base import formats
    from numapin.base.strict_json import decode
    from numapin.rank import handover

    try:
        command = decode(handover.read_text(str(folder / handover.COMMAND)))
    except (OSError, ValueError):
        return ""
    argv = command.get("argv") if isinstance(command, dict) else None
    return formats.quote_all(map(str, argv[1:])) if isinstance(argv, list) else ""
