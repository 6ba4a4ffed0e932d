"""Stage 3: start the ranks with torch's elastic agent. Edge.

Comes in: a `Plan` and a `Job`. Goes out: ranks, run to their end by torch.distributed.elastic. This module does no
binding: every rank starts as `rank/shim.py`, which applies its slice of the plan. Worker variables, restarts, signals
and exit behavior are torchrun's own; docs/moving-from-torchrun.md lists the differences. Jobs on one host without
restarts do not need the agent: `launcher/direct.py` starts them without torch.
"""

from __future__ import annotations

import copy
import os
import socket
import sys
import uuid
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch

from numapin.base.stderr import say
from numapin.launcher import rendezvous
from numapin.launcher.agent import replacing_torch_agent
from numapin.launcher.command import python
from numapin.launcher.listening import LOOPBACK
from numapin.launcher.rendezvous_id import why_known
from numapin.launcher.run_folder import run_directory
from numapin.launcher.torchrun import configure
from numapin.rank import handover, shim

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from numapin.launcher.agent import FailedRound
    from numapin.launcher.failure import EndedRank
    from numapin.launcher.torchrun import Job
    from numapin.plan.model import Plan
    from numapin.rank.signals import Mailbox


def _ignore(_: Sequence[EndedRank], __: int) -> None:
    """Take no note of a failed round."""


def launch(
    plan: Plan,
    job: Job,
    run_dir: str,
    mailbox: Mailbox,
    before_restart: Callable[[], None],
    *,
    failed_round: FailedRound = _ignore,
) -> None:
    """Start the ranks and run them to their end.

    Args:
        plan: The binding of each rank.
        job: The parsed torchrun command line.
        run_dir: The directory of this run.
        mailbox: The signals to pass on to the ranks.
        before_restart: Called before ranks are restarted. If it raises NumapinError, this host leaves the job.
        failed_round: Called when ranks of this host have failed and all of them have ended, with their ends and the
            number of restarts that are left.

    Raises:
        ChildFailedError: A rank failed (torch's error).
        SignalException: A signal stopped the launcher; all ranks have ended by then (torch's error).
        NumapinError: `before_restart` raised it, or the run's folder is gone and no other can be made.

    Example:
        ```python
        import os

        import numapin
        from numapin.cli.run import make_run_parser
        from numapin.launch import launch
        from numapin.launcher.run_folder import run_directory
        from numapin.launcher.torchrun import parse
        from numapin.rank.signals import open_mailbox

        job = parse(["train.py"], make_run_parser())
        plan = numapin.make_plan(numapin.discover(), numapin.Request())
        mailbox = open_mailbox()
        mailbox.leave(job.signals)
        with run_directory(os.environ) as run_dir:
            launch(plan, job, run_dir, mailbox, before_restart=lambda: None)
        ```
    """
    config, command = configure(_with_logs_in(run_dir, job.arguments), len(plan.ranks))
    _secure_rendezvous(config, job)
    handover.hand_over(plan, run_dir, os.environ)
    with ExitStack() as open_folders:
        new_logs = _Folders(plan, job, run_dir, open_folders).new_logs
        open_folders.enter_context(replacing_torch_agent(job, mailbox, before_restart, new_logs, failed_round))
        open_folders.enter_context(_local_host_name() if job.is_single_host else nullcontext())
        record(elastic_launch(config, sys.executable))(*_shim(command))


class _Folders:
    """The folder of a run that may last for weeks, and the next one if a cleaner of temporary files removed it."""

    def __init__(self, plan: Plan, job: Job, run_dir: str, open_folders: ExitStack) -> None:
        self._plan, self._job, self._run_dir, self._open = plan, job, run_dir, open_folders
        self._identity = handover.identity(run_dir)

    def new_logs(self) -> LogsSpecs | None:
        """Check the run's folder before ranks start; return where their logs go now, None if that has not changed.

        torch makes its folders by path. Where the run's folder was, there may now be a folder in which another user
        replaces its files with links. Then the run goes on in a new folder.

        Raises NumapinError if no other can be made.
        """
        if self._identity is not None and handover.identity(self._run_dir) == self._identity:
            return None
        lost, environ = self._run_dir, {**os.environ}
        environ.pop("NUMAPIN_RUN_DIR", None)  # hand_over has set it
        self._run_dir = self._open.enter_context(run_directory(environ))
        self._identity = handover.identity(self._run_dir)
        say(
            f"warning: the folder of this run, {lost}, was removed or replaced, as cleaners of temporary files do; "
            f"{self._run_dir} takes its place; to prevent this, set NUMAPIN_RUN_DIR to a folder outside of /tmp"
        )
        handover.hand_over(self._plan, self._run_dir, os.environ)
        if not _keeps_no_logs(self._job.arguments):
            return None
        config, _ = configure(_with_logs_in(self._run_dir, self._job.arguments), len(self._plan.ranks))
        return config.logs_specs


def _with_logs_in(run_dir: str, arguments: argparse.Namespace) -> argparse.Namespace:
    """Return torchrun's arguments, with the logs that the user does not keep in the run's folder."""
    arguments = copy.copy(arguments)
    if _keeps_no_logs(arguments):
        arguments.log_dir = os.path.join(run_dir, "logs")  # torchrun would leave a folder in /tmp
    return arguments


def _shim(command: Sequence[str]) -> list[str]:
    """Return the arguments of the interpreter that becomes the user's command.

    The first argument without a dash is the user's script, because torch's errors name the job by that argument. torch
    replaces "${local_rank}" and "$$" in all arguments, but torchrun does not do so in the program's name, so "$" is
    doubled there.
    """
    program, *rest = command
    is_python, program = program == python(), program.replace("$", "$$")
    ids = ["--local-rank=${local_rank}", f"--launcher={os.getpid()}"]
    first = [f"--exec={program}"] if is_python else ["--exec=", program]
    return ["-I", "-S", f"-c{shim.CODE.replace('$', '$$')}", *ids, *first, *rest]


def _secure_rendezvous(config: LaunchConfig, job: Job) -> None:
    """Replace torch's rendezvous where it is not needed, or where it would unpickle data from strangers."""
    rendezvous.register()
    if job.is_single_host:
        config.rdzv_backend, config.rdzv_endpoint = rendezvous.ONE_HOST, ""
        config.rdzv_configs = {"port": job.arguments.master_port if job.port_chosen else 0}
        config.run_id = job.arguments.rdzv_id if job.has_rendezvous_id else str(uuid.uuid4())
        config.local_addr = config.local_addr or LOOPBACK
    elif config.rdzv_backend == "c10d":
        config.rdzv_backend = rendezvous.SIGNED_C10D
        _warn_of_known_id(config, job)
    elif config.rdzv_backend == "etcd-v2":
        say(
            "warning: the rendezvous state in etcd-v2 is a pickle that numapin does not sign: anyone who can write to "
            f"{config.rdzv_endpoint} can run code as you; use --rdzv-backend c10d"
        )
        if job.may_rendezvous_again:  # torch announces the shared store's address in the first round only
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _warn_of_known_id(config: LaunchConfig, job: Job) -> None:
    """Warn if others can know the rendezvous id, with which they can run code as this user."""
    problem = why_known(config.run_id, is_typed=job.typed_rendezvous_id)
    if problem:
        say(
            f"warning: {problem}: anyone who knows it and can reach {config.rdzv_endpoint} can run code as you; make "
            "one with openssl rand -hex 16 and set it on every host, without --rdzv-id: export PET_RDZV_ID=…"
        )


def _keeps_no_logs(arguments: argparse.Namespace) -> bool:
    return arguments.log_dir is None and arguments.logs_specs is None and arguments.redirects == arguments.tee == "0"


@contextmanager
def _local_host_name() -> Iterator[None]:
    """Answer lookups of this host's full name without a name server.

    torch 2.13 looks it up five times, for messages only. Each lookup can take minutes if no name server answers.
    """
    lookup = socket.getfqdn
    socket.getfqdn = lambda name="": name or socket.gethostname()
    try:
        yield
    finally:
        socket.getfqdn = lookup
