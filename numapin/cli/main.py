"""`numapin`: the group of commands, and how an error becomes a message and an exit status. Edge.

Comes in: sys.argv. Goes out: an exit status (0 ok; 1 a rank failed; 2 usage; 3 machine; 4 no plan; 5 refused).
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from numapin import __version__
from numapin.base.printable import printable, printable_lines
from numapin.cli.output import say_error
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn

_OF_WRITING: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF}
"""What write fails with: a full disk or quota, a closed pipe or terminal."""

_GARBAGE_THRESHOLD: Final = 200_000  # Python's own is 700 or 2000

_COMMANDS: Final = {
    "run": "Run a training script, one bound rank per GPU. Replaces torchrun.",
    "exec": "Bind a rank that srun, mpirun or torchrun started, and exec its command.",
    "topo": "Show the machine: packages, NUMA nodes, caches, cores, GPUs, NICs.",
    "plan": "Show what `run` would bind, and why.",
    "verify": "Compare a running job's threads and pages with its plan.",
    "top": "Show a running job live: threads, memory, GPUs.",
    "doctor": "Find what makes jobs slow or unsafe on this machine, and how to fix it.",
    "bench": "Measure copies, allocation, overlap, start-up and DataLoaders.",
    "job": "Write job scripts for Slurm, MPI, Kubernetes, PBS or LSF.",
    "trace": "Profile a script: where the time of each step goes, and what to change.",
}


class _LazyGroup(click.Group):
    """Import a command's module only when it is the one that runs: `topo` must not pay for `run`'s torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List commands in the order in which a user meets them."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, and enable the garbage collection that `cli.entry` disabled for the imports."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"numapin.cli.{cmd_name}"), cmd_name)
        # Objects by the hundred thousand, none of them garbage, come out of large files: look for garbage less often.
        gc.set_threshold(_GARBAGE_THRESHOLD)
        gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Shell completion: eval "$(_NUMAPIN_COMPLETE=bash_source numapin)" (or zsh_source, fish_source).',
)
@click.version_option(__version__, prog_name="numapin")
@click.option("--local_rank", hidden=True, help="What `deepspeed --no_python` adds; LOCAL_RANK says the same.")
def numapin(local_rank: str | None) -> None:
    """Run multi-GPU PyTorch with each rank on the CPUs and the memory of its GPU's NUMA node.

    \b
    Examples:
      numapin topo                     see the machine
      numapin plan                     see what each rank would get
      numapin run train.py             start one bound rank per GPU
      numapin verify                   see that a running job is where it was planned
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    del local_rank


def main() -> None:
    """Run the command line and leave with its status; on Ctrl-C die by SIGINT, so that a shell's loop ends too."""
    sys.excepthook = _show_uncaught
    try:
        status: str | int | None = numapin.main(prog_name="numapin", standalone_mode=False)
    except SystemExit as leaving:  # of argparse, or as torchrun leaves
        status = leaving.code
    except NumapinError as error:
        fail(error)
    except click.ClickException as error:
        _show(error)
        status = error.exit_code
    except click.Abort:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_WRITING:
            raise
        status = _unwritten(error)
    leave(status)


def _show(error: click.ClickException) -> None:
    """Show what click says of the command line, without what a terminal would take for a command in it."""
    is_help = type(error).__name__ == "NoArgsIsHelpError"  # of click 8.2; its message is the whole help
    if not is_help and not error.message.isprintable():
        error.message = printable(error.message)  # type: ignore[misc] # Final in newer clicks; each makes a text of it
    with suppress(OSError):
        error.show()


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show a traceback as Python does, without what a terminal would take for a command in it.

    torch reports ranks that failed by an exception, which names the script and what it raised.
    """
    import traceback  # takes 3 ms

    text = shown = "".join(traceback.format_exception(kind, error, trace))
    for word in sys.argv:
        shown = shown.replace(word, printable(word)) if word else shown  # else a line break in it would remain
    shown = printable_lines(shown)
    if shown == text:
        sys.__excepthook__(kind, error, trace)
        return
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(shown)


def fail(error: NumapinError) -> NoReturn:
    """Say what went wrong and leave with the error's status."""
    say_error(error.message, error.hint)
    leave(error.exit_code)


def leave(status: str | int | None) -> NoReturn:
    """Exit. What stdout does not take is an error, what stderr does not take is dropped.

    Python would try again when it ends, and make every status 120.
    """
    if error := _flush_or_drop("stdout"):
        status = status or _unwritten(error)
    _flush_or_drop("stderr")
    gc.freeze()  # Python looks for garbage when it ends, a tenth of a short command's time
    sys.exit(status)


def _unwritten(error: OSError) -> int:
    """Say why stdout did not take all, and return the status; what ends early, as `| head`, has seen enough."""
    if not isinstance(error, BrokenPipeError):
        say_error(f"stdout cannot be written: {error.strerror}")
    return 1


def _flush_or_drop(name: str) -> OSError | None:
    """Write what is left of a stream; where that fails, have no such stream any more, and return why."""
    try:
        if (stream := getattr(sys, name)) is not None:
            stream.flush()
    except OSError as error:
        setattr(sys, name, None)
        return error
    return None
