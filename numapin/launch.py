"""Stage 3: start the ranks. Edge.

Comes in: a `Plan` and a `Job` (the parsed torchrun command line). Goes out: ranks, run to their end by
torch.distributed.elastic. Knows nothing of NUMA: every rank starts as the shim `rank.py`, which reads its slice of the
plan from the run directory.

Options, defaults, PET_* variables, worker variables and exit behaviour are those of the installed torch, because its
own parser, configuration and agent do the work. The differences from torchrun are the functions named `_without_*`
and `_rendezvous`, and README.md lists them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import os
import shutil
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch

from numapin import rundir
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.launcher.api import LaunchConfig

    from numapin.plan import Plan

_PACKAGE_PARENT: Final = str(Path(__file__).resolve().parent.parent)
# Appended, so that nothing beside this package can take the place of a standard module in the shim.
_RANK: Final = f"import sys; sys.path.append({_PACKAGE_PARENT!r}); from numapin.rank import main; main()"
_RUN_PATH: Final = (
    "import sys; from torch.distributed.elastic.multiprocessing.errors import record; "
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

    `numa_binding` is torchrun's option of that name; `num_ranks` is None where the user left the number to us.
    """

    arguments: argparse.Namespace
    own: tuple[str, ...]
    numa_binding: str | None
    num_ranks: int | None


class _TorchFirst(argparse.ArgumentParser):
    """torchrun's parser with options added, in which an abbreviation never means an added one.

    So every abbreviation that torchrun takes keeps its meaning, and what it finds ambiguous stays ambiguous.
    """

    own: frozenset[str] = frozenset()

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return [match for match in super()._get_option_tuples(option_string) if match[1] not in self.own]


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
    torch_parser = torchrun.get_args_parser()
    torch_parser.__class__ = _TorchFirst
    parser = cast("_TorchFirst", torch_parser)
    parser.own = frozenset(name for option in own for name in option.names)
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


def parse(arguments: Sequence[str], parser: argparse.ArgumentParser) -> Job:
    """Parse a command line as torchrun would. Raises SystemExit as argparse does, UsageError for a missing script."""
    parsed = parser.parse_args(list(arguments))
    own, binding = tuple(parsed.numapin_own), parsed.numa_binding
    del parsed.numapin_own
    _require_program(parsed)
    return Job(arguments=parsed, own=own, numa_binding=binding, num_ranks=_num_ranks(parsed.nproc_per_node))


def launch(plan: Plan, job: Job, run_dir: str) -> None:
    """Run the ranks to their end.

    Raises what torchrun raises: ChildFailedError where a rank failed, SignalException where the launcher was told to
    stop (all ranks are gone then).
    """
    arguments = _rendezvous(job.arguments, len(plan.ranks))
    if _logs_nothing(arguments):
        arguments.log_dir = os.path.join(run_dir, "logs")  # torchrun leaves an empty folder in /tmp behind every run
    rundir.write_json(run_dir, rundir.PLAN, plan.to_json())
    rundir.write_json(run_dir, rundir.COMMAND, {"argv": sys.argv, "pid": os.getpid()})
    config, command = _config(arguments)
    os.environ["NUMAPIN_RUN_DIR"] = run_dir
    rundir.hand_over_plan(plan.to_json(), os.environ)
    # torch leaves some 300 000 objects that live until the end: without them the last collections take a third of a
    # second less.
    gc.freeze()
    with _without_name_lookups(standalone=arguments.local_addr == "127.0.0.1"):
        record(elastic_launch(config, sys.executable))(*_shim(command))


def command_of(job: Job) -> list[str]:
    """Return the command that each rank becomes after binding, "${local_rank}" not yet put in."""
    arguments = _rendezvous(job.arguments, 1)
    arguments.log_dir = os.devnull
    return _config(arguments)[1]


def _shim(command: Sequence[str]) -> list[str]:
    # Written so that the first argument without a dash is the user's script: torch names the job by it in its errors.
    program, *rest = command
    first = [f"--exec={program}"] if program == _python() else ["--exec=", program]
    return ["-I", "-S", f"-c{_RANK}", "--local-rank=${local_rank}", *first, *rest]


def _python() -> str:
    return os.environ.get("PYTHON_EXEC", sys.executable)


def _config(arguments: argparse.Namespace) -> tuple[LaunchConfig, list[str]]:
    """Let torch make its configuration, and turn what it would run into one command."""
    with _without_thread_default():
        # With a NUMA mode given, torch neither asks CUDA for the number of devices nor switches its own binder on. The
        # mode itself is dropped again: two binders must not fight.
        config, entrypoint, rest = torchrun.config_from_args(
            argparse.Namespace(**{**vars(arguments), "numa_binding": "node"})
        )
    config.numa_options = None
    if callable(entrypoint):  # --run-path
        return config, [_python(), "-u", f"-c{_RUN_PATH}", *rest]
    return config, [entrypoint, *rest]


def _rendezvous(arguments: argparse.Namespace, num_ranks: int) -> argparse.Namespace:
    """Put in the number of ranks, and the loopback rendezvous where one host was given no other.

    torchrun looks the host's own name up for that, and waits minutes where it does not resolve.
    """
    arguments = copy.copy(arguments)
    arguments.nproc_per_node = str(num_ranks)
    static = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and arguments.master_port is None
    alone = static and _max_nodes(arguments.nnodes) == 1
    if arguments.standalone or alone:
        arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "127.0.0.1:0"
        arguments.rdzv_id = str(uuid.uuid4())
        arguments.local_addr = arguments.local_addr or "127.0.0.1"
    if arguments.master_port is None:
        arguments.master_port = 29500  # torchrun's default for several hosts
    return arguments


def _max_nodes(nnodes: str) -> int:
    try:
        return int(torchrun.parse_min_max_nnodes(nnodes)[1])
    except (ValueError, RuntimeError):
        raise UsageError(f"--nnodes {nnodes!r} is not a number or MIN:MAX", "for one host: --nnodes 1") from None


def _num_ranks(nproc_per_node: str | None) -> int | None:
    if nproc_per_node is None:
        return None
    try:
        return int(torchrun.determine_local_world_size(nproc_per_node) or 0)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: {error}", "give a number, or gpu, cpu or auto") from None


def _require_program(arguments: argparse.Namespace) -> None:
    program = arguments.training_script
    if arguments.module:
        return  # finding a module may run its package; the rank's own message names it
    runs_python = arguments.run_path or not arguments.no_python
    if not (os.path.exists(program) if runs_python else shutil.which(program)):
        where = "" if os.path.isabs(program) else f" in {os.getcwd()}"
        raise UsageError(f"{program} does not exist{where}", "a module is run with -m, a program with --no-python")


def _logs_nothing(arguments: argparse.Namespace) -> bool:
    return arguments.log_dir is None and arguments.logs_specs is None and arguments.redirects == arguments.tee == "0"


@contextlib.contextmanager
def _without_thread_default() -> Iterator[None]:
    """Keep torch from setting OMP_NUM_THREADS=1 where it is unset: each rank sets its own thread count."""
    unset = "OMP_NUM_THREADS" not in os.environ
    if unset:
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if unset:
            del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _without_name_lookups(*, standalone: bool) -> Iterator[None]:
    """Answer the agent's questions for this host's full name locally while the rendezvous is on the loopback.

    torch 2.13 asks five times, for messages only; each lookup can take minutes where no name server answers.
    """
    lookup = socket.getfqdn
    if standalone:
        socket.getfqdn = lambda name="": name or socket.gethostname()
    try:
        yield
    finally:
        socket.getfqdn = lookup
