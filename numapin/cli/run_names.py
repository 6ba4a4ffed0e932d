"""Names of this user's runs, for completion. Edge.

Comes in: the environment. Goes out: the names of active runs, and the plans of those and of runs that have ended and
left their folders.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import click
    from click.shell_completion import CompletionItem


def live_run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of active runs, with their commands, and folders."""
    from click.shell_completion import CompletionItem

    from numapin.launcher.run_folder import live_runs

    del ctx, param
    folders = [Path(folder) for folder in live_runs(os.environ)]
    runs = [CompletionItem(path.name, help=_command(path)) for path in folders if path.name.startswith(incomplete)]
    return [*runs, CompletionItem(incomplete, type="dir")]


def plan_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the plan files of active and of left runs, the newest first, and files."""
    from click.shell_completion import CompletionItem

    from numapin.rank.handover import PLAN

    del ctx, param
    paths = [path for base in _bases(os.environ) for path in Path(base).glob(f"run-*/{PLAN}")]
    newest_first = sorted(paths, key=lambda path: path.parent.name, reverse=True)  # the names begin with the time
    plans = [CompletionItem(str(path)) for path in newest_first if str(path).startswith(incomplete)]
    return [*plans, CompletionItem(incomplete, type="file")]


def _bases(environ: Mapping[str, str]) -> list[str]:
    """Return the folders in which this user's runs are."""
    from numapin.launcher.run_folder import own_bases

    named = environ.get("NUMAPIN_RUN_DIR")
    return [str(Path(named).absolute())] if named else list(own_bases(environ))


def _command(folder: Path) -> str:
    """Return the command line of a run; "" if it cannot be read."""
    from numapin.base import quoting
    from numapin.base.strict_json import decode
    from numapin.rank import handover

    try:
        command = decode(handover.read_text(str(folder / handover.COMMAND)))
    except (OSError, ValueError):
        return ""
    argv = command.get("argv") if isinstance(command, dict) else None
    return quoting.join(map(str, argv[1:])) if isinstance(argv, list) else ""
