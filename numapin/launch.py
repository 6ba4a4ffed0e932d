"""The life of a job on this host: join the other hosts, start the ranks, watch them, restart or end them, and report.

On one host nothing of torch is imported. The ranks find what they have under torchrun: the same variables, a store,
the same signals, the same grace period.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.files import open_at
from numapin.base.stderr import say
from numapin.base.text import counted
from numapin.errors import NumapinError, Stopped
from numapin.launcher import ranks as rank_processes
from numapin.launcher.hosts import NotMet, OneHost, SeveralHosts
from numapin.launcher.logs import Logs
from numapin.launcher.ranks import START_HINT, Alarm, StartedRank, ended_on_error, guarded, notes_of
from numapin.launcher.run_folder import run_directory
from numapin.rank import handover
from numapin.system import cgroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numapin.launcher.failure import RanksFailed
    from numapin.launcher.hosts import HostPlace, Hosts
    from numapin.launcher.logs import RankOutput
    from numapin.launcher.options import Job
    from numapin.launcher.survivors import LastLook
    from numapin.plan.model import Plan
    from numapin.rank.signals import Mailbox

# An ended rank and a signal end the wait at once. This bounds how late a rank's new handler is seen.
_LOOK_S: Final = 0.1


class RoundFailed(Exception):  # noqa: N818 - ends the other ranks; the report follows when they have ended
    """A rank failed, maybe on another host; `seen` is the last look at the local ranks in `still_running`."""

    def __init__(self, still_running: frozenset[int], seen: LastLook) -> None:
        super().__init__(still_running)
        self.still_running, self.seen = still_running, seen


class _HostsWait(Exception):  # noqa: N818 - ends this round's ranks; the next round has more or other hosts
    """Other hosts wait for the next round."""


def launch(plan: Plan, job: Job, run_dir: str, mailbox: Mailbox, before_restart: Callable[[], None]) -> None:
    """Start the ranks and run them to their end. If `before_restart` raises NumapinError, this host leaves the job.

    When RanksFailed (a rank failed, and no restart is left) or Stopped (by a signal) is raised, all ranks have ended.
    Other errors say why a rank did not start, why hosts did not meet, or which address or port cannot be used.
    """
    restarts = 0
    failure: RanksFailed | None = None
    with ExitStack() as opened:
        signals = job.signals
        if "signals_to_handle" not in job.typed and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            signals -= {signal.SIGHUP}  # under nohup, the job outlives the terminal
        alarm = opened.enter_context(Alarm(signals))
        hosts = opened.enter_context(hosts_of(job, len(plan.ranks), alarm))
        logs = Logs(job)
        handover.hand_over(plan, run_dir, os.environ)
        folder_id = handover.folder_id(run_dir)
        while True:
            if folder_id is None or handover.folder_id(run_dir) != folder_id:
                run_dir, folder_id = _replace_folder(plan, run_dir, opened)
            try:
                place = hosts.join(alarm)  # the numbers of this host and its ranks, and their store's address
                failure = None  # while ranks run; between rounds it is why the last one ended
                failure = _run_round(
                    plan, job, run_dir, restarts, place=place, hosts=hosts, alarm=alarm, mailbox=mailbox, logs=logs
                )
                if failure is None:
                    return
                if restarts == job.max_restarts:
                    raise failure
                restarts += 1
                left = counted(job.max_restarts - restarts, "restart")
                say(f"round {restarts}: {failure.failure.summary}; the ranks are restarted, {left} left")
                hosts.leave_round()
            except (NotMet, _HostsWait) as ended:
                if alarm.stopped_by is not None:  # by a signal that came while the ranks ended
                    raise Stopped(alarm.stopped_by, notes_of(ended)) from None
                if isinstance(ended, _HostsWait):
                    continue
                if failure is None:
                    raise
                say(f"{ended.message}; the ranks are not restarted")
                raise failure from None
            try:
                before_restart()
            except NumapinError:
                hosts.let_others_continue()
                raise


def _run_round(
    plan: Plan,
    job: Job,
    run_dir: str,
    restarts: int,
    *,
    place: HostPlace,
    hosts: Hosts,
    alarm: Alarm,
    mailbox: Mailbox,
    logs: Logs,
) -> RanksFailed | None:
    """Run the ranks once. Return the failure, None if the job has succeeded.

    Raises NotMet, _HostsWait, and Stopped if a signal stopped the job after it had failed.
    """
    kills_before, ranks = cgroup.read_kills(), list[StartedRank]()  # kills for lack of memory
    shared = place.shared_variables(os.environ, role=job.role, restarts=restarts, max_restarts=job.max_restarts)
    try:
        with (
            hosts.reporting_errors(),  # of a guardian that cannot be started
            closing(logs),
            guarded(run_dir),  # ends the ranks if this process is killed
            ended_on_error(ranks, run_dir, job.shutdown_timeout_s, alarm.is_urgent, alarm.take_signal),
            hosts.reporting_errors(),  # all others, before the ranks of this host are ended
        ):
            files = logs.begin(restarts, place, run_dir)
            for local_rank, own_files in enumerate(files):
                alarm.ring()  # raises StopSignal for a signal that came meanwhile
                planned = {handover.SLICE: handover.slice_text(plan.ranks[local_rank])}
                variables = {**shared, **planned, **_own_variables(job, local_rank, place, own_files)}
                ranks.append(start_rank(job, local_rank, variables, own_files))
            _watch(ranks, job, hosts, mailbox, alarm)
    except RoundFailed as failed:
        failure = failure_of(job, plan, place, ranks, files, failed=failed, kills_before=kills_before)
        failure = hosts.agree_on_first(failure, alarm)
        alarm.take_signal()  # sets `stopped_by` if a signal came while the ranks ended
        if alarm.stopped_by is not None:
            # Schedulers signal all processes at once: a rank that this signal ended is not the cause.
            own = failure.failure
            ended_by_our_signal = own.elsewhere is None and own.first.signal_number == alarm.stopped_by
            raise Stopped(alarm.stopped_by, notes_of(failed)) from (None if ended_by_our_signal else failure)
        for note in getattr(failed, "__notes__", ()):
            say(note)
        return failure
    hosts.succeeded(alarm)  # takes up to minutes; all ranks have been reaped
    return None


def hosts_of(job: Job, num_ranks: int, alarm: Alarm) -> Hosts:
    """Return how the hosts of a job meet. Raises NotMet, UsageError, and StopSignal if a signal comes meanwhile."""
    if job.is_fixed:
        from numapin.launcher.fixed_hosts import FixedHosts  # a job on one host does not need it

        # The first of `tasks.hosts.job_ids_of`: mpirun may start the processes of other hosts in a step of Slurm.
        job_id = os.environ.get("NUMAPIN_HOSTS", "").partition(" ")[0] if job.hosts_from else ""
        return FixedHosts(job, num_ranks, job_id)
    if not job.is_single_host:
        return SeveralHosts(job, num_ranks, alarm)
    return OneHost(num_ranks, job.local_addr, job.master_port, run_id=job.run_id, uses_torch=bool(job.why_torch))


def _watch(ranks: Sequence[StartedRank], job: Job, hosts: Hosts, mailbox: Mailbox, alarm: Alarm) -> None:
    """Wait until all ranks have ended well. Raises RoundFailed, _HostsWait and StopSignal."""
    mailbox.address({rank.local_rank: rank.process.pid for rank in ranks})
    asked_s = time.monotonic()
    while True:
        running = [rank for rank in ranks if rank.status is None]
        if not running and not hosts.must_wait():
            return
        alarm.wait(_LOOK_S)
        mailbox.deliver()  # also those that came just before a signal to end
        alarm.ring()
        for rank in running:
            rank.look()
        # The hosts come first: a rank may have failed because another host was stopped, which has said so before.
        if hosts.has_failed_elsewhere() or any(rank.status for rank in running):
            from numapin.launcher import survivors  # a job that succeeds does not need it

            still_running = [rank for rank in running if rank.is_running]
            seen = survivors.look(rank.process.pid for rank in still_running)
            raise RoundFailed(frozenset(rank.local_rank for rank in still_running), seen)
        if time.monotonic() >= asked_s + job.monitor_interval:
            asked_s = time.monotonic()
            if hosts.num_waiting():
                raise _HostsWait


def start_rank(job: Job, local_rank: int, variables: Mapping[str, str], files: RankOutput) -> StartedRank:
    """Start one rank, which first binds itself in `rank.shim`. Raises NumapinError if the kernel refuses it."""
    words = job.command_of(local_rank)
    program, *arguments = ["", *words] if job.no_python and not job.run_path else words  # "": not a Python
    try:
        with ExitStack() as opened:
            streams = [opened.enter_context(open(path, "ab", opener=open_at)) if path else None for path in files[1:]]
            process = rank_processes.start(
                local_rank, sys.executable, program, arguments, variables, stdout=streams[0], stderr=streams[1]
            )
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        raise NumapinError(f"rank {local_rank} cannot be started: {error}", START_HINT) from None
    return StartedRank(local_rank, process)


def failure_of(
    job: Job,
    plan: Plan,
    place: HostPlace,
    ranks: Sequence[StartedRank],
    files: Sequence[RankOutput],
    *,
    failed: RoundFailed,
    kills_before: cgroup.Kills | None,
) -> RanksFailed:
    """Return how the ranks of this host ended, with what they recorded. One that is still there counts as killed."""
    from numapin.base.strict_json import decode  # a job that succeeds needs neither
    from numapin.launcher.failure import EndedRank, JobFailure, RanksFailed, in_order

    ended = list[EndedRank]()
    for rank, own, planned in zip(ranks, files, plan.ranks, strict=True):
        error: object = None
        is_disk_full = False
        with suppress(OSError, ValueError):
            disk = os.statvfs(os.path.dirname(own.error))
            has_size = disk.f_blocks > 0  # ramfs, tmpfs without a limit and some of FUSE report 0 blocks
            is_disk_full = has_size and disk.f_bavail * disk.f_frsize < 1 << 20
            error = decode(handover.read_text(own.error))
        ended.append(
            EndedRank(
                local_rank=rank.local_rank,
                rank=place.first_rank + rank.local_rank,
                pid=rank.process.pid,
                exitcode=-signal.SIGKILL if rank.status is None else rank.status,
                ended_s=rank.ended_s or time.time(),
                was_ended=rank.local_rank in failed.still_running and rank.asked_s is not None,
                asked_s=rank.asked_s,
                stack=failed.seen.stacks.get(rank.process.pid, ""),
                is_left=rank.status is None,
                error_file=own.error,
                error=error,
                logs=own.logs,
                is_disk_full=is_disk_full,
                gpu=planned.gpu.index if planned.gpu else None,
                node=planned.node,
            )
        )
    order, why_first = in_order(ended, is_only_host=job.is_single_host)
    return RanksFailed(
        JobFailure(
            program=job.program,
            host=os.uname().nodename,
            ranks=order,
            why_first=why_first,
            is_only_host=job.is_single_host,
            out_of_memory=cgroup.explain(kills_before),
            out_of_memory_advice=cgroup.REMEDY,
            shm_bytes=failed.seen.shm_bytes,
            shm_used=failed.seen.shm_used,
        )
    )


def _replace_folder(plan: Plan, lost: str, opened: ExitStack) -> tuple[str, tuple[int, int] | None]:
    """Make another folder for a run whose folder was removed, or replaced by another user's; return its id, too.

    Raises NumapinError.
    """
    environ = {name: value for name, value in os.environ.items() if name != "NUMAPIN_RUN_DIR"}  # set by hand_over
    run_dir = opened.enter_context(run_directory(environ))
    say(
        f"warning: the folder of this run, {lost}, was removed or replaced, as cleaners of temporary files do; "
        f"{run_dir} takes its place; to prevent this, set NUMAPIN_RUN_DIR to a folder outside of /tmp"
    )
    handover.hand_over(plan, run_dir, os.environ)
    return run_dir, handover.folder_id(run_dir)


def _own_variables(job: Job, local_rank: int, place: HostPlace, files: RankOutput) -> dict[str, str]:
    """Return torchrun's variables of one rank."""
    own = {
        "RANK": str(place.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": str(place.first_role_rank + local_rank),
        "TORCHELASTIC_ERROR_FILE": files.error,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job.signals_to_handle,
    }
    if job.virtual_local_rank:  # the plan has at most as many ranks as the list has GPUs
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu = str(local_rank) if listed is None else listed.split(",")[local_rank].strip()
        own |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu}
    return own
