"""torchrun's command line, with our options added. Edge.

Comes in: the arguments of `numapin run`. Goes out: a `Job`, and torch's own launch configuration for it. Options,
defaults, spellings, abbreviations and PET_* variables are those of the installed torch, because its own parser and
configuration do the work.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from torch.distributed import argparse_util
from torch.distributed import run as torch_run
from torch.distributed.elastic.utils.api import macros

from numapin.base.printable import printable, printable_lines
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    from torch.distributed.launcher.api import LaunchConfig

# torchrun runs a --run-path script in a process that it spawned; the path of that has no folder of the caller's.
_RUN_PATH: Final = (
    "import sys; del sys.path[0]; from torch.distributed.elastic.multiprocessing.errors import record; "
    "from torch.distributed.run import run_script_path; record(run_script_path)(*sys.argv[1:])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOption:
    """An option that torchrun does not have: its spellings, and whether it takes a value."""

    names: tuple[str, ...]
    takes_value: bool
    metavar: str | None
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A parsed command line. `own` are the arguments that are not torchrun's, as typed; `arguments` torchrun's.

    `command` is what each rank becomes, "${local_rank}" not yet put in. `nproc_per_node` is None where the user left
    it to us, `port_chosen` says whether --master-port was given, and `shutdown_timeout_s` is None for torch's own time.
    """

    arguments: argparse.Namespace
    own: tuple[str, ...]
    command: tuple[str, ...]
    nproc_per_node: str | None
    numa_binding: str | None
    port_chosen: bool
    shutdown_timeout_s: int | None = None

    @property
    def min_max_nodes(self) -> tuple[int, int]:
        """Return how many hosts the job needs at least, and takes at most."""
        least, most = torch_run.parse_min_max_nnodes(self.arguments.nnodes)
        return int(least), int(most)

    @property
    def may_meet_again(self) -> bool:
        """Return whether ranks may have to find each other anew: restarted ones, or with hosts that join."""
        least, most = self.min_max_nodes
        return bool(least < most or self.arguments.max_restarts > 0)

    @property
    def signals(self) -> frozenset[signal.Signals]:
        """Return the signals on which torch ends all ranks; torch warns of a word that is no signal's."""
        words = {word.strip() for word in getattr(self.arguments, "signals_to_handle", "").split(",")}
        return frozenset(number for number in signal.Signals if number.name in words)

    @property
    def is_alone(self) -> bool:
        """Return whether the job has this host only: then it needs no rendezvous, whatever endpoint was given."""
        if self.arguments.standalone:
            return True
        if self.min_max_nodes[1] > 1:
            return False
        backend = self.arguments.rdzv_backend
        return backend == "c10d" or (backend == "static" and not self.arguments.rdzv_endpoint)

    @property
    def has_rendezvous_id(self) -> bool:
        """Return whether the user named the rendezvous; torchrun drops the name with --standalone."""
        return not self.arguments.standalone and self.arguments.rdzv_id != "none"

    def command_of(self, local_rank: int) -> list[str]:
        """Return the command that this rank becomes; torch puts its number into the arguments, not the program."""
        program, *rest = self.command
        return [program, *macros.substitute(rest, str(local_rank))]


class _TorchFirst(argparse.ArgumentParser):
    """torchrun's parser with options added, in which an abbreviation never means an added one.

    So every abbreviation that torchrun takes keeps its meaning, and what it finds ambiguous stays ambiguous.
    """

    own: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        """Refuse the command line, without what a terminal would take for a command in it."""
        super().error(printable(message))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return [match for match in super()._get_option_tuples(option_string) if match[1] not in self.own]


class _VisibleRecord(logging.LogRecord):
    """A line of torch's log, without what a terminal would take for a command: it names scripts, folders and hosts."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        """Return the message; each line of several stays one, to which torch adds where it comes from."""
        return printable_lines(super().getMessage())


def keep_log_visible() -> None:
    """Let what torch logs in this process have visible characters only, whichever logger and handler it is for."""
    logging.setLogRecordFactory(_VisibleRecord)


class _Collect(argparse.Action):
    """Keep an option of ours as it was typed; click parses it afterwards, with the same rules as in `numapin plan`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Append the option and its value."""
        del parser
        typed = [option_string] if values in (None, []) else [option_string, values]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *typed])


def make_parser(own: Sequence[OwnOption], *, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return the installed torch's torchrun parser with our options in a group of their own."""
    torch_parser = torch_run.get_args_parser()
    torch_parser.__class__ = _TorchFirst
    parser = cast("_TorchFirst", torch_parser)
    parser.own = frozenset(name for option in own for name in option.names) | _add_what_torch_lacks(parser)
    parser.prog, parser.description, parser.epilog = "numapin run", description, epilog
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.conflict_handler = "resolve"  # a later torch may take one of our names; then ours keeps its meaning
    group = parser.add_argument_group("binding options (numapin)")
    for option in own:
        group.add_argument(
            *option.names,
            action=_Collect,
            dest="numapin_own",
            nargs=None if option.takes_value else 0,
            default=(),
            metavar=option.metavar if option.takes_value else None,
            help=option.help.replace("%", "%%"),
        )
    # None tells that the user left it to us; older torches give the port a default like any other.
    for name in ("nproc_per_node", "master_port"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    return parser


def _add_what_torch_lacks(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Give an older torch the option --shutdown-timeout of torch 2.13; return the names that were added."""
    names = ("--shutdown-timeout", "--shutdown_timeout")
    if any(name in action.option_strings for action in parser._actions for name in names):  # noqa: SLF001 - no other way
        return frozenset()
    parser.add_argument(
        *names,
        action=argparse_util.env,
        type=int,
        default=None,
        help="Time in seconds between asking ranks to end and killing them (30, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT).",
    )
    return frozenset(names)


def _shutdown_timeout_s(arguments: argparse.Namespace) -> int | None:
    """Return the time that the option or torch's variable gives. Raises UsageError for what torch 2.13 refuses."""
    given = arguments.shutdown_timeout
    try:
        seconds = int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) if given is None else given
    except KeyError:
        return None
    except ValueError as error:
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: {error}", "give seconds, such as 60") from None
    if seconds < 0:
        raise UsageError(f"--shutdown-timeout is {seconds}; it must not be negative", "give seconds, such as 60")
    return int(seconds)


def parse(arguments: Sequence[str], parser: argparse.ArgumentParser) -> Job:
    """Parse a command line as torchrun would.

    Raises SystemExit as argparse does, and UsageError for what torch's own configuration does not take.
    """
    parsed = parser.parse_args(list(arguments))
    given = {name: parsed.__dict__.pop(name) for name in ("numapin_own", "nproc_per_node", "numa_binding")}
    port_chosen = parsed.master_port is not None
    parsed.master_port = parsed.master_port or 29500
    _require_program(parsed)
    command = _command(parsed)
    return Job(
        arguments=parsed,
        own=tuple(given["numapin_own"]),
        command=command,
        nproc_per_node=given["nproc_per_node"],
        numa_binding=given["numa_binding"],
        port_chosen=port_chosen,
        shutdown_timeout_s=_shutdown_timeout_s(parsed),
    )


def number_of_ranks(nproc_per_node: str) -> int:
    """Return what torch makes of a word or number of --nproc-per-node. Raises UsageError."""
    try:
        return torch_run.determine_local_world_size(nproc_per_node) or 0
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: {error}", "give a number, or gpu, cpu or auto") from None


def configure(arguments: argparse.Namespace, num_ranks: int) -> tuple[LaunchConfig, list[str]]:
    """Let torch make its configuration, and turn what it would run into one command.

    With a NUMA mode given, torch does not ask CUDA for the number of devices. The mode itself is dropped again: two
    binders must not fight.
    """
    arguments = copy.copy(arguments)
    arguments.nproc_per_node, arguments.numa_binding = str(num_ranks), "node"
    with _thread_count_set():
        config, entrypoint, rest = torch_run.config_from_args(arguments)
    config.numa_options = None
    if callable(entrypoint):  # --run-path
        return config, [python(), "-u", f"-c{_RUN_PATH}", *rest]
    return config, [entrypoint, *rest]


def python() -> str:
    """Return the interpreter that torchrun runs scripts with."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def _command(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Ask torch for the command, which also finds what is wrong before anything is read or started."""
    arguments = copy.copy(arguments)
    arguments.log_dir = os.devnull  # where torch makes no folder
    try:
        return tuple(configure(arguments, 1)[1])
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(f"torchrun does not take this: {error}", "see the options with: numapin run --help") from None


def _require_program(arguments: argparse.Namespace) -> None:
    program = arguments.training_script
    if arguments.module:
        return  # finding a module may run its package; the rank's own message names it
    runs_python = arguments.run_path or not arguments.no_python
    if not (os.path.exists(program) if runs_python else shutil.which(program)):
        where = "" if os.path.isabs(program) else f" in {os.getcwd()}"
        raise UsageError(f"{program} does not exist{where}", "a module is run with -m, a program with --no-python")


@contextmanager
def _thread_count_set() -> Iterator[None]:
    """Keep torch from setting OMP_NUM_THREADS=1 for all ranks, with a warning, where it is unset: each sets its own."""
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]
