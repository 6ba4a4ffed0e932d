"""The command group `numapin`, and the conversion of errors to messages and exit statuses."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from numapin import __version__
from numapin.base.formats import did_you_mean, quote_all
from numapin.base.stderr import say
from numapin.base.text import printable, printable_lines
from numapin.cli.output import emit, prepare_streams, say_block, say_error
from numapin.errors import MachineError, NumapinError, Stopped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import NoReturn, TextIO

    from click.shell_completion import CompletionItem

_WRITE_ERRORS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF}
"""Errors of a write: a full disk or quota, a closed pipe or terminal."""

_JUDGES: Final = frozenset({"verify", "doctor"})  # status 1 means findings; 3: they could not finish

_HELP: Final = re.compile(r"numapin( .*)? --help$")
_CHOICE: Final = re.compile(r"'(?P<word>[^']*)' is not one of (?P<known>[^;]*)")
_UNKNOWN: Final = re.compile(
    r"(no such (?P<kind>option|command) |got unexpected extra argument )['(](?P<word>.*)[')]", re.DOTALL
)
_WITHOUT_VALUE: Final = re.compile(r"option (?P<name>--?[\w-]+) needs a value$")
_NAMES_ELSEWHERE: Final = {
    **dict.fromkeys(("-n", "-np", "--nprocs", "--num-processes", "--num-gpus"), "--nproc-per-node"),
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--gpu-ids": "--gpus",
}
"""Options of mpirun, torch_xla, accelerate and deepspeed, and ours."""
_NEEDLESS: Final = ("--multi-gpu", "--use-env")
"""Options of accelerate and torch.distributed.launch for what `run` does anyway."""
_RUN_ELSEWHERE: Final = ("torchrun", "launch")  # the names of `run` in torch and accelerate
_OTHER_COMMANDS: Final = {"numapin": "run", "run": "plan", "trace": "plan"}
"""The command that may have an option that this one lacks, such as --machine, or --nproc-per-node without `run`."""

_GARBAGE_THRESHOLD: Final = 200_000  # Python's own is 700 or 2000

_GROUPS: Final = {  # of the help page; a line of at most 64 characters fits a terminal of 80
    "Start": {
        "run": "Run a training script, one bound rank per GPU, like torchrun.",
        "exec": "Bind a rank that srun, mpirun or torchrun started, and exec it.",
        "attach": "Bind running processes.",
    },
    "See": {
        "topo": "Show the machine: sockets, nodes, PCIe switches, GPUs and NICs.",
        "plan": "Show what `run` would bind, and why.",
        "verify": "Compare a running job's threads and pages with its plan.",
        "top": "Show a running job live: threads, memory, GPUs.",
        "doctor": "Find what makes jobs slow or unsafe here, and how to fix it.",
    },
    "Measure": {
        "trace": "Profile a script: where each step's time goes, what to change.",
        "compare": "Compare launchers on a script: which is faster, how certain.",
        "bench": "Measure copies, allocation, overlap and DataLoaders.",
    },
    "Clusters": {"job": "Write job scripts for Slurm, MPI, Kubernetes, PBS or LSF."},
    "Shell": {"completion": "Print the script that completes commands in bash, zsh or fish."},
}
_COMMANDS: Final = {name: text for group in _GROUPS.values() for name, text in group.items()}
_NAME_WIDTH: Final = max(map(len, _COMMANDS))
_HIDDEN: Final = {"_complete": ("completion", "complete_line")}  # programs call them: their modules and names there


class _LazyGroup(click.Group):
    """A group that imports only the module of the command that runs: `topo` does not need `run`'s imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order of the help page."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, and enable garbage collection, which `cli.entry` disabled for the imports."""
        del ctx
        if cmd_name not in _COMMANDS and cmd_name not in _HIDDEN:
            return None
        module, name = _HIDDEN.get(cmd_name, (cmd_name, cmd_name))
        command: click.Command = getattr(import_module(f"numapin.cli.{module}"), name)
        # Large files become hundreds of thousands of objects, none of them garbage: collect less often.
        gc.set_threshold(_GARBAGE_THRESHOLD)
        gc.enable()
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands without importing them."""
        from click.shell_completion import CompletionItem

        named = [CompletionItem(name, help=text) for name, text in _COMMANDS.items() if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read no words as `--help`, and `help COMMAND` as `COMMAND --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args or ["--help"])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in their groups, without importing them, before the options."""
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{_NAME_WIDTH}}", text) for name, text in commands.items()])
        click.Command.format_options(self, ctx, formatter)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="numapin")
@click.option("--local_rank", hidden=True, help="Added by `deepspeed --no_python`; same as LOCAL_RANK.")
def numapin(local_rank: str | None) -> None:
    """Run multi-GPU PyTorch with each rank on its GPU's NUMA node.

    \b
    Examples:
      numapin topo                     see the machine
      numapin plan                     see what each rank would get
      numapin run train.py             start one bound rank per GPU
      numapin verify                   check that a running job is where planned
    """
    del local_rank


def main() -> None:
    """Run the command line and exit with its status; on Ctrl-C die of SIGINT, so that a shell's loop ends too."""
    sys.excepthook = _show_uncaught
    prepare_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see cli.entry
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status: str | int | None = numapin.main(prog_name="numapin", standalone_mode=False)
    except SystemExit as exiting:  # exec ends with the status of its command, for example
        status = exiting.code
    except NumapinError as error:
        fail(error)
    except click.ClickException as error:
        _show(error)
        status = error.exit_code
    except click.Abort as abort:
        if not isinstance(abort.__cause__, EOFError):
            _die_of_sigint()
            raise
        # click takes it for the end of a prompt, of which there are none; Python raises it for a module that is cut off
        _show_uncaught(EOFError, abort.__cause__, abort.__cause__.__traceback__)
        status = MachineError.exit_code if _is_judging() else 1
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _WRITE_ERRORS:
            status = _report_unwritten(error)
        elif _is_judging():
            _show_uncaught(type(error), error, error.__traceback__)
            status = MachineError.exit_code
        else:
            raise
    leave(status)


def _is_judging() -> bool:
    return not _JUDGES.isdisjoint(sys.argv[1:2])


def _show(error: click.ClickException) -> None:
    """Show click's message about the command line as our own errors are shown, with the command's help as the hint."""
    if type(error).__name__ == "NoArgsIsHelpError":  # since click 8.2; its message is the whole help
        try:
            emit(f"{error.format_message()}\n")
        except OSError as unwritten:
            _report_unwritten(unwritten)
        return
    # click's message in our form, without its own suggestion, which differs among its versions
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        message = f"no such option '{error.option_name}'"
    elif isinstance(error, click.UsageError) and message.startswith("No such command"):
        message = error.message
    elif isinstance(error, click.BadOptionUsage) and message.endswith("requires an argument."):
        message = f"option {error.option_name} needs a value"
    elif isinstance(error, click.MissingParameter):
        message, _, _ = message.partition(". Choose from")  # the choices are its name, too
    message = message.removesuffix(".")
    context: click.Context | None = getattr(error, "ctx", None)  # an option without its value has none
    path = context.command_path if context else _find(sys.argv[1:])[1]
    hint = f"{path} --help"
    is_extra = message.startswith("Got unexpected extra argument") and not message.endswith("(help)")
    is_job = path == "numapin plan" and is_extra
    if context and is_job and not any(context.params.get(name) for name in ("machine", "root", "as_json")):
        hint = quote_all(["numapin", "run", "--dry-run", *sys.argv[sys.argv.index("plan") + 1 :]])
    _say(message[:1].lower() + message[1:], hint)


def _say(message: str, hint: str) -> None:
    """Print an error. If its remedy is a command's help, add what was meant or is missing, and the command's usage."""
    command: click.Command | None = None
    usage = ""
    if named := _HELP.search(hint):
        command, path = _find((named[1] or "").split())
        shown = click.Context(command, info_name=path, **command.context_settings)
        usage = " ".join([path, *command.collect_usage_pieces(shown)])
    more = _values(message, command) or _suggestion(message, command)
    say_error(message + more, hint, usage=usage)


def _find(words: Sequence[str]) -> tuple[click.Command, str]:
    """Return the command whose names these words begin with, and its path."""
    command: click.Command = numapin
    path = "numapin"
    for word in words:
        found = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if found is None:
            break
        command, path = found, f"{path} {word}"
    return command, path


def _suggestion(message: str, command: click.Command | None) -> str:
    """Return "; did you mean X?" for a message that names an unknown word; "" if nothing known is like it."""
    choice = _CHOICE.search(message)
    if choice is not None:
        return did_you_mean(choice["word"], re.findall(r"[\w:.-]+", choice["known"]))
    unknown = _UNKNOWN.match(message)
    if unknown is None or command is None:
        return ""
    typed = unknown["word"]
    if typed == "help":
        return "; did you mean --help?"
    if unknown["kind"] == "option":
        return _like_option(typed, command)
    if command is numapin and (typed.endswith(".py") or typed in _RUN_ELSEWHERE):
        script = "" if typed in _RUN_ELSEWHERE else f" {typed}"
        return f"; did you mean numapin run{script}?"
    commands = command.list_commands(click.Context(command)) if isinstance(command, click.Group) else []
    return did_you_mean(typed, commands)


def _like_option(typed: str, command: click.Command) -> str:
    known, word = _options_of(command), typed.replace("_", "-")
    if word in _NEEDLESS:
        return "; leave it out"
    word = _NAMES_ELSEWHERE.get(word, word)
    if word in known:
        return f"; did you mean {word}?"
    other = _OTHER_COMMANDS.get(command.name or "")
    if other is not None and word in _options_of(getattr(import_module(f"numapin.cli.{other}"), other)):
        return f"; did you mean numapin {other} {word}?"
    return did_you_mean(typed, known)


def _values(message: str, command: click.Command | None) -> str:
    """Return ": a, b or c" if an option has no value, with the values that it takes or their kind; else ""."""
    named = _WITHOUT_VALUE.match(message)
    if named is None or command is None:
        return ""
    option = next((param for param in command.params if named["name"] in param.opts), None)
    if option is None:
        return ""
    if isinstance(option.type, click.Choice):
        return f": {' or '.join(', '.join(option.type.choices).rsplit(', ', 1))}"
    return f": {option.metavar or option.type.name.upper()}"


def _options_of(command: click.Command) -> list[str]:
    """Return the long options that help shows, in their usual spelling."""
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    return sorted(name for name in names if name.startswith("--") and "_" not in name)


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show a traceback as Python does, without control characters: torch's may name the script's arguments."""
    import traceback  # takes 3 ms

    text = shown = "".join(traceback.format_exception(kind, error, trace))
    for word in filter(None, sys.argv):
        shown = shown.replace(word, printable(word))  # line breaks too
    shown = printable_lines(shown)
    if shown == text:
        sys.__excepthook__(kind, error, trace)
        return
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(shown)


def fail(error: NumapinError) -> NoReturn:
    """Print the error and exit with its status, or die of SIGINT if that stopped the launcher."""
    if error.block:
        say_block(error.block)
    if isinstance(error, Stopped):
        say(error.message)
    elif not error.block:
        _say(error.message, error.hint)
    if error.exit_code == 128 + signal.SIGINT:
        _flush_or_drop("stdout")
        _flush_or_drop("stderr")
        _die_of_sigint()
    leave(error.exit_code)


def _die_of_sigint() -> None:
    """End this process by SIGINT, which a shell takes for Ctrl-C and ends its loop."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def leave(status: str | int | None) -> NoReturn:
    """Exit. Unwritten output is an error on stdout, dropped on stderr; Python itself would make any status 120."""
    if error := _flush_or_drop("stdout"):
        status = status or _report_unwritten(error)
    _flush_or_drop("stderr")
    gc.freeze()  # Python's last collection would be a tenth of a short command's time
    sys.exit(status)


def _report_unwritten(error: OSError) -> int:
    """Report why stdout could not be written, and return the status. Stay silent if the reader left (`| head`)."""
    if not isinstance(error, BrokenPipeError):
        say_error(f"stdout cannot be written: {error.strerror}")
    return MachineError.exit_code if _is_judging() else 1


def _flush_or_drop(name: str) -> OSError | None:
    """Flush a stream of sys; if that fails, drop the stream and return the error."""
    stream: TextIO | None = getattr(sys, name)
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        setattr(sys, name, None)
        return error
    return None
