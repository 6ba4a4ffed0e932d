"""The hooks of `numapin run` and `numapin trace` in the ranks' programs, and the programs that take none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from numapin.base.stderr import say
from numapin.cli.output import warn_or_refuse
from numapin.errors import UsageError
from numapin.rank import hook_env

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.cli.run import RunOptions


def hook_environment(command: Sequence[str], options: RunOptions, trace: str) -> dict[str, str]:
    """Return the variables that give the ranks the chosen data path and the tracing hook.

    Raises UsageError, or BindingRefused with --strict, if the hook cannot run in this command.
    """
    if trace:
        _check_trace_hook(command)
    elif options.dataloader != "torch":
        _check_dataloader_hook(command, strict=options.strict)
    return hook_env.environment(options.dataloader, os.environ, trace=trace)


def _check_trace_hook(command: Sequence[str]) -> None:
    """Raise UsageError if the hook cannot run in this command."""
    reason = hook_env.refusal(command)
    if reason:
        raise UsageError(f"numapin trace cannot work: {reason}", hook_env.TRACE_REMEDY)
    _note_other_program("numapin trace", command)


def _check_dataloader_hook(command: Sequence[str], *, strict: bool) -> None:
    """Warn if the hook cannot run in this command. Raises BindingRefused instead if `strict`."""
    reason = hook_env.refusal(command)
    if reason:
        warn_or_refuse(f"--dataloader numapin cannot work: {reason}", hook_env.REMEDY, strict=strict)
    else:
        _note_other_program("--dataloader numapin", command)


def _note_other_program(feature: str, command: Sequence[str]) -> None:
    if not hook_env.is_python(command):
        say(f"{feature} applies to the Python processes that {command[0]} starts, if any")
