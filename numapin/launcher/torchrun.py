"""torchrun's command line, with our options added. Edge.

Comes in: the arguments of `numapin run`. Goes out: a `Job`, and torch's own launch configuration for it. The installed
torch's own parser and configuration do the work, so its options, defaults, spellings, abbreviations and PET_* variables
apply.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import argparse_util
from torch.distributed import run as torch_run
from torch.distributed.elastic.utils.api import macros

from numapin.base.printable import printable_lines
from numapin.errors import UsageError
from numapin.launcher.command import RUN_PATH, python, require_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    from torch.distributed.launcher.api import LaunchConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOption:
    """An option that torchrun does not have: its spellings, and whether it takes a value."""

    names: tuple[str, ...]
    takes_value: bool
    metavar: str | None
    help: str

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Add the option to a group of a parser; click parses its value later."""
        group.add_argument(
            *self.names,
            action=_Collect,
            dest="numapin_own",
            nargs=None if self.takes_value else 0,
            default=(),
            metavar=self.metavar if self.takes_value else None,
            help=self.help.replace("%", "%%"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A parsed command line.

    Attributes:
        arguments: torchrun's own arguments.
        own: The arguments that are not torchrun's, as typed.
        command: The command that each rank becomes, "${local_rank}" not yet replaced.
        nproc_per_node: As typed. None: numapin decides.
        numa_binding: The value of torchrun's --numa-binding.
        port_chosen: Whether --master-port was given.
        typed_rendezvous_id: Whether --rdzv-id is on the command line, not only in PET_RDZV_ID.
        shutdown_timeout_s: Seconds from SIGTERM to SIGKILL. None: torch's default.
        why_agent: Why torch's agent starts the ranks.
    """

    arguments: argparse.Namespace
    own: tuple[str, ...]
    command: tuple[str, ...]
    nproc_per_node: str | None
    numa_binding: str | None
    port_chosen: bool
    typed_rendezvous_id: bool
    shutdown_timeout_s: int | None = None
    why_agent: str = ""

    @property
    def program(self) -> str:
        """Return the script, module or program, as typed."""
        return str(self.arguments.training_script)

    @property
    def virtual_local_rank(self) -> bool:
        """Return whether each rank sees its GPU only, as local rank 0. torch 2.9 does not have the option."""
        return bool(getattr(self.arguments, "virtual_local_rank", False))

    @property
    def min_max_nodes(self) -> tuple[int, int]:
        """Return the minimum and the maximum number of hosts."""
        least, most = torch_run.parse_min_max_nnodes(self.arguments.nnodes)
        return int(least), int(most)

    @property
    def may_rendezvous_again(self) -> bool:
        """Return whether ranks may have to meet again: after a restart, or when a host joins."""
        least, most = self.min_max_nodes
        return bool(least < most or self.arguments.max_restarts > 0)

    @property
    def signals(self) -> frozenset[signal.Signals]:
        """Return the signals on which torch ends all ranks. torch itself warns of unknown names."""
        words = {word.strip() for word in getattr(self.arguments, "signals_to_handle", "").split(",")}
        return frozenset(number for number in signal.Signals if number.name in words)

    @property
    def is_single_host(self) -> bool:
        """Return whether the job runs on this host only, and so needs no rendezvous, even if an endpoint was given."""
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
        """Return the command that this rank becomes. torch puts its number into the arguments, not the program."""
        program, *rest = self.command
        return [program, *macros.substitute(rest, str(local_rank))]


class _TorchFirst(argparse.ArgumentParser):
    """torchrun's parser with options added, in which an abbreviation never means an added option.

    Every abbreviation that torchrun accepts keeps its meaning, and every ambiguous one stays ambiguous.
    """

    own: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        """Refuse the command line: raise UsageError."""
        if "training_script" in message.partition("arguments are required:")[2]:
            raise UsageError("there is no script to run", f"{self.prog} train.py")
        raise UsageError(message, f"{self.prog} --help")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return [match for match in super()._get_option_tuples(option_string) if match[1] not in self.own]


class _VisibleRecord(logging.LogRecord):
    """A record of torch's log without control characters: the log names scripts, folders and hosts."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        """Return the message. Line ends stay, because torch adds the origin to each line."""
        return printable_lines(super().getMessage())


def keep_log_visible() -> None:
    """Remove control characters from everything that is logged in this process, for all loggers and handlers."""
    logging.setLogRecordFactory(_VisibleRecord)


class _Collect(argparse.Action):
    """Collect our options as typed. click parses them afterwards, with the same rules as in `numapin plan`."""

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


def make_parser(own: Sequence[OwnOption]) -> argparse.ArgumentParser:
    """Return the installed torch's torchrun parser, with our options in a group of their own."""
    torch_parser = torch_run.get_args_parser()
    torch_parser.__class__ = _TorchFirst
    parser = cast("_TorchFirst", torch_parser)
    parser.own = frozenset(name for option in own for name in option.names) | _add_what_torch_lacks(parser)
    parser.prog = "numapin run"
    parser.conflict_handler = "resolve"  # if a later torch uses one of our names, ours keeps its meaning
    group = parser.add_argument_group("binding options (numapin)")
    for option in own:
        option.add_to(group)
    _unset_defaults(parser, "nproc_per_node", "master_port")
    return parser


def _unset_defaults(parser: argparse.ArgumentParser, *names: str) -> None:
    """Make None mean that the user did not choose; older torches give the port a default."""
    for name in names:
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})


def _add_what_torch_lacks(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Give an older torch the option --shutdown-timeout of torch 2.12; return the names that were added."""
    names = ("--shutdown-timeout", "--shutdown_timeout")
    try:
        parser.add_argument(
            *names,
            action=argparse_util.env,
            type=int,
            default=None,
            help="Seconds between asking ranks to end and killing them (30, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT).",
        )
    except argparse.ArgumentError:  # this torch has it; a conflict is still an error here
        return frozenset()
    return frozenset(names)


def _shutdown_timeout_s(arguments: argparse.Namespace) -> int | None:
    """Return the seconds from the option or torch's variable. Raises UsageError for values that torch 2.12 refuses."""
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

    Raises SystemExit for --help, and UsageError for arguments that the parser or torch's own configuration refuses.
    """
    default_id = parser.get_default("rdzv_id")  # PET_RDZV_ID, else "none"
    parser.set_defaults(rdzv_id=None)
    parsed = parser.parse_args(list(arguments))
    typed_rendezvous_id = parsed.rdzv_id is not None
    if not typed_rendezvous_id:
        parsed.rdzv_id = default_id
    parser.set_defaults(rdzv_id=default_id)
    given = {name: parsed.__dict__.pop(name) for name in ("numapin_own", "nproc_per_node", "numa_binding")}
    port_chosen = parsed.master_port is not None
    parsed.master_port = parsed.master_port or 29500
    require_program(parsed.training_script, module=parsed.module, no_python=parsed.no_python, run_path=parsed.run_path)
    command = _command(parsed)
    return Job(
        arguments=parsed,
        own=tuple(given["numapin_own"]),
        command=command,
        nproc_per_node=given["nproc_per_node"],
        numa_binding=given["numa_binding"],
        port_chosen=port_chosen,
        typed_rendezvous_id=typed_rendezvous_id,
        shutdown_timeout_s=_shutdown_timeout_s(parsed),
    )


def number_of_ranks(nproc_per_node: str) -> int:
    """Return the number of ranks that torch reads from --nproc-per-node, a word or a number. Raises UsageError."""
    try:
        return torch_run.determine_local_world_size(nproc_per_node) or 0
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: {error}", "give a number, or gpu, cpu or auto") from None


def configure(arguments: argparse.Namespace, num_ranks: int) -> tuple[LaunchConfig, list[str]]:
    """Let torch make its configuration, and turn its entry point into one command.

    With a NUMA mode given, torch does not ask CUDA for the number of devices. The mode is dropped again, because
    torch's binding would undo ours.
    """
    arguments = copy.copy(arguments)
    arguments.nproc_per_node, arguments.numa_binding = str(num_ranks), "node"
    with _thread_count_set():
        config, entrypoint, rest = torch_run.config_from_args(arguments)
    config.numa_options = None
    if callable(entrypoint):  # --run-path
        return config, [python(), "-u", f"-c{RUN_PATH}", *rest]
    return config, [entrypoint, *rest]


def _command(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the command that torch would run, which also checks the arguments before anything is started."""
    arguments = copy.copy(arguments)
    arguments.log_dir = os.devnull  # torch makes no folder there
    try:
        return tuple(configure(arguments, 1)[1])
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"torchrun refuses these arguments: {error}", "see the options with: numapin run --help"
        ) from None


@contextmanager
def _thread_count_set() -> Iterator[None]:
    """Keep torch from setting OMP_NUM_THREADS=1 for all ranks, with a warning. Each rank sets its own."""
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]
