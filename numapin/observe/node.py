"""All runs of a host, sampled together at little cost.

Threads and GPUs are read each time. Processes and pages, for which the kernel walks page tables, are read less often;
the interval grows with the cost.

Root sees the runs of all users, and trusts none of them: a run's folder, its records and the environment of its ranks
are what its user wrote there.
"""

from __future__ import annotations

import os
import pwd
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.files import opened
from numapin.base.formats import quote
from numapin.base.text import without_none
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.launcher import run_folder
from numapin.observe.find import read_run
from numapin.observe.model import Thread
from numapin.observe.read import LIVE, observe
from numapin.observe.top import Sample, top
from numapin.steps.totals import find_waited, read_waited
from numapin.system import proc
from numapin.system.proc import activity
from numapin.tasks.identify import parse_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numapin.observe.find import RunningJob
    from numapin.observe.model import ObservedRank
    from numapin.observe.top import Top
    from numapin.topology.readings import GpuLoad


# --- samples of one job ----------------------------------------------------------------------------------------------

_PAGES_EVERY_S: Final = 10.0
_REST: Final = 250  # seconds between readings of the pages per second of CPU that one took: 0.4 % of a core


class Sampler:
    """Takes samples of one job; `loads` reads its GPUs."""

    def __init__(self, job: RunningJob, loads: Callable[[], Mapping[str, GpuLoad]]) -> None:
        self._pids, self._gone, self._loads = job.pids, job.gone, loads
        self._bound = frozenset(job.applied)
        self._starts = without_none(job.starts)
        self._read_pages()

    def _read_pages(self) -> None:
        began_s = time.process_time()
        self._observed = observe(self._pids, gone=self._gone)
        found = {rank: find_waited(pid) for rank, pid in self._pids.items() if rank not in self._gone}
        self._loops = {rank: descriptor for rank, descriptor in found.items() if descriptor is not None}
        took_s = time.process_time() - began_s
        self._next_pages_s = time.monotonic() + max(_PAGES_EVERY_S, _REST * took_s)

    def sample(self) -> Sample:
        """Read threads and GPUs, and the pages if they are due."""
        if time.monotonic() >= self._next_pages_s:
            self._read_pages()
        ticks_per_s, booted_s = os.sysconf("SC_CLK_TCK"), time.clock_gettime(time.CLOCK_BOOTTIME)
        ranks: dict[int, ObservedRank] = {}
        cpu_s: dict[int, dict[int, float]] = {}
        up_s: dict[int, float] = {}
        for rank in self._observed.ranks:
            number = rank.local_rank
            # Of a rank that is known to be gone, other processes may have the ids now.
            found = {} if number in self._gone else {pid: activity(pid) for pid in rank.pids}
            stat, _ = found.get(rank.pid, (None, {}))
            is_another = stat is not None and self._starts.setdefault(number, stat.start) != stat.start
            if is_another:
                self._gone |= {number}
                found = {}
            processes = []
            for process in rank.processes:
                names = {thread.tid: thread.name for thread in process.threads}  # a new one gets its process's
                cpus_of = found[process.pid][1] if found else {}
                threads = (
                    Thread(tid=tid, name=names.get(tid, process.name), cpus=cpus, last_cpu=None)
                    for tid, cpus in cpus_of.items()
                )
                processes.append(replace(process, threads=tuple(threads)))
            ranks[number] = replace(rank, processes=tuple(processes))
            cpu_s[number] = {pid: stat.own_ticks / ticks_per_s for pid, (stat, _) in found.items() if stat is not None}
            own, own_threads = found.get(rank.pid, (None, {}))
            if own is not None and own_threads:
                up_s[number] = max(booted_s - own.start / ticks_per_s, 0.0)
        loops = {rank: descriptor for rank, descriptor in self._loops.items() if rank not in self._gone}
        waited = {rank: read_waited(self._pids[rank], descriptor) for rank, descriptor in loops.items()}
        return Sample(
            at_s=time.monotonic(),
            ranks=ranks,
            bound=self._bound,
            gone=frozenset(ranks) - up_s.keys(),
            loads=self._loads(),
            swapped=read_swapped(),
            waited={rank: totals for rank, totals in waited.items() if totals is not None},
            cpu_s=cpu_s,
            up_s=up_s,
        )


def read_swapped(*, root: Path = LIVE) -> tuple[int, int] | None:
    """Return the pages swapped in and out since the machine started; None if the kernel does not count them."""
    try:
        text = (root / "proc/vmstat").read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    values = dict(line.split() for line in text.splitlines())
    if not values.keys() >= {"pswpin", "pswpout"}:  # a kernel without swap
        return None
    return int(values["pswpin"]), int(values["pswpout"])


# --- all jobs of the host --------------------------------------------------------------------------------------------

_JOB_IDS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
"""The variables of batch systems: see srun(1), qsub(1) of PBS, LSF's environment variables, flux-environment(7)."""
_IN_KUBERNETES: Final = "KUBERNETES_SERVICE_HOST"
_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MOST_RUNS: Final = 32  # of one user
_MOST_RANKS: Final = 1024  # of one user: the number of samples and of files to read grows with it
_SEARCH_EVERY_S: Final = 10.0  # each search reads the environments of all processes
_PROBLEMS: Final = (NumapinError, OSError, ValueError)  # with one run, which must not hide the other runs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrigin:
    """The origin of a job. None: unknown."""

    host: str
    user: str | None = None
    job_id: str | None = None  # the batch system's number
    pod: str | None = None  # of Kubernetes, and its namespace
    namespace: str | None = None
    ranks: Mapping[int, int] = field(default_factory=dict)  # the number in the whole job, by local rank


def origin_of(job: RunningJob, environ: Mapping[str, str]) -> JobOrigin:
    """Return where a job comes from, by the environments that its ranks started with; `environ` is this process's."""
    found = {rank: proc.environment_of(pid) or {} for rank, pid in job.pids.items() if rank not in job.gone}
    shown = next(filter(None, found.values()), {})
    user = pod = namespace = None
    if job.owner is not None:
        user = str(job.owner)
        with suppress(KeyError):
            user = pwd.getpwuid(job.owner).pw_name
    if _IN_KUBERNETES in shown:
        pod, namespace = shown.get("POD_NAME") or shown.get("HOSTNAME"), shown.get("POD_NAMESPACE")
        is_own_pod = _IN_KUBERNETES in environ and shown.get("HOSTNAME") == environ.get("HOSTNAME")
        if namespace is None and is_own_pod:
            with suppress(OSError, UnicodeDecodeError):
                namespace = _NAMESPACE.read_text(encoding="utf-8").strip()
    job_id = next((shown[name] for name in _JOB_IDS if shown.get(name)), None)
    numbers = {rank: parse_count(each.get("RANK", "")) for rank, each in found.items()}
    ranks = {rank: number for rank, number in numbers.items() if number is not None}
    return JobOrigin(host=os.uname().nodename, user=user, job_id=job_id, pod=pod, namespace=namespace, ranks=ranks)


class JobFollower:
    """A job that is sampled repeatedly; `again` finds ranks that start later or were restarted."""

    def __init__(
        self, job: RunningJob, again: Callable[[], RunningJob], loads: Callable[[], Mapping[str, GpuLoad]]
    ) -> None:
        self.job, self._again, self._loads = job, again, loads
        self._begin(job)

    def _begin(self, job: RunningJob) -> None:
        self.job, self._sampler = job, Sampler(job, self._loads)
        self._before = self._sampler.sample()

    def look(self) -> Top:
        """Return the job's activity since the last look."""
        now = self._sampler.sample()
        seen = top(self.job.name, self.job.plan, before=self._before, now=now)
        self._before = now
        return seen

    def is_incomplete(self, seen: Top) -> bool:
        """Return whether ranks are gone, or have not started yet."""
        is_starting = self.job.owner is not None and len(self.job.pids) < len(self.job.plan.ranks)
        return is_starting or any(rank.is_gone for rank in seen.ranks)

    def search(self, seen: Top) -> bool:
        """Look for ranks that a run has started; return whether the job has ended. Raises MachineError."""
        if self.job.owner is None:  # nothing names the ranks that another launcher will start
            return seen.has_ended
        try:
            found = self._again()
        except UsageError:  # it has ended, or its launcher was killed while ranks are still running
            return seen.has_ended
        if (found.pids, found.starts) != (self.job.pids, self.job.starts):
            self._begin(found)
        return False


class NodeFollower:
    """The runs on this host that this user may see; `loads` reads the GPUs.

    `unread` are the folders of runs that could not be read, and those of a user beyond `_MOST_RUNS` or `_MOST_RANKS`.
    """

    def __init__(self, loads: Callable[[], Mapping[str, GpuLoad]], environ: Mapping[str, str]) -> None:
        self._read_loads, self._environ = loads, environ
        self._loads: Mapping[str, GpuLoad] = {}
        self._followed: dict[str, tuple[JobFollower, JobOrigin]] = {}
        self._next_search_s = 0.0
        self.unread: set[str] = set()

    def look(self) -> list[tuple[Top, JobOrigin]]:
        """Return the activity of each run since the last look; a new run is in the next one."""
        self._loads = self._read_loads()  # once for all runs: it takes 20 ms a GPU
        seen: list[tuple[Top, JobOrigin]] = []
        is_due = time.monotonic() >= self._next_search_s
        for folder, (follower, origin) in list(self._followed.items()):
            try:
                now = follower.look()
                if is_due and follower.is_incomplete(now):
                    job = follower.job
                    if follower.search(now):
                        del self._followed[folder]
                        continue
                    if follower.job is not job:
                        self._followed[folder] = follower, origin_of(follower.job, self._environ)
            except _PROBLEMS:
                del self._followed[folder]  # found again if it can be read again
            else:
                seen.append((now, origin))
        if is_due:
            self._search()
            self._next_search_s = time.monotonic() + _SEARCH_EVERY_S
        return seen

    def _search(self) -> None:
        self.unread = set()
        num_runs = Counter(follower.job.owner for follower, _ in self._followed.values())
        num_ranks: Counter[int | None] = Counter()
        for follower, _ in self._followed.values():
            num_ranks[follower.job.owner] += len(follower.job.plan.ranks)
        for folder, owner in running_folders().items():
            if folder in self._followed:
                continue
            if num_runs[owner] >= _MOST_RUNS:
                self.unread.add(folder)
                continue
            num_runs[owner] += 1
            try:
                job = _read_own(folder, most_ranks=_MOST_RANKS - num_ranks[owner])
                if job.pids:
                    # Its user may write another plan later, but not one with more ranks.
                    most_ranks = len(job.plan.ranks)
                    num_ranks[owner] += most_ranks
                    again = partial(_read_own, folder, most_ranks=most_ranks)
                    follower = JobFollower(job, again, lambda: self._loads)
                    self._followed[folder] = follower, origin_of(job, self._environ)
            except UsageError:  # it is starting or ending
                continue
            except _PROBLEMS:
                self.unread.add(folder)


def running_folders() -> dict[str, int]:
    """Return the folders of active runs and their users, the newest run first.

    Their ranks have them in their environments, wherever the temporary directory of their job is.
    """
    named = {(proc.environment_of(pid) or {}).get("NUMAPIN_RUN_DIR", "") for pid in proc.all_pids()}
    found: dict[str, int] = {}
    for folder in named:
        if run_folder.is_live(folder):
            with suppress(OSError), opened(folder) as descriptor:  # the kernel gives one path for all spellings
                found[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_uid  # noqa: PTH115
    return dict(sorted(found.items(), key=lambda entry: os.path.basename(entry[0]), reverse=True))  # noqa: PTH119


def _read_own(folder: str, *, most_ranks: int) -> RunningJob:
    """Read a run with the ranks that are processes of its user, each once: its records could name any process.

    A thread's id does not count: all threads of its process would be read again for it.

    Raises UsageError, MachineError and OSError, see `read_run`.
    """
    job = read_run(Path(folder))
    if len(job.plan.ranks) > most_ranks:
        problem = f"{folder}: the runs of its user have more than {_MOST_RANKS} ranks"
        raise MachineError(problem, f"watch this run alone: numapin top {quote(folder)}")
    own: dict[int, int] = {}
    for rank, pid in job.pids.items():
        with suppress(proc.Gone, OSError, NumapinError):
            folder_of = proc.folder_of(pid)
            is_own = job.owner in (0, int(proc.status_field(folder_of, "Uid").split()[0]))
            is_process = int(proc.status_field(folder_of, "Tgid")) == pid
            if is_own and is_process and pid not in own.values():
                own[rank] = pid
    return replace(job, pids=own)
