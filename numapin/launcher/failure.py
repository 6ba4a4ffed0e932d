"""The account of a job whose ranks failed: how each ended, which was the first, and what probably ended it.

A rank's error file has the format of torch's @record, written by any version of Python and torch, or by our own hook.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.text import listed
from numapin.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.launcher.fixed_hosts import HostFailure

_SHELLS_SIGNAL: Final = 128  # what a shell, and thus a wrapper script, adds to the number of its program's signal
_SUMMARY_CHARS: Final = 400
STACK_SIGNAL: Final = signal.SIGRTMAX - 1
"""Makes a rank write its stack (`survivors`); ends a Python that is just ending."""
_ENDINGS: Final = {0, *(end for number in (1, 2, 3, 9, 15, STACK_SIGNAL) for end in (-number, _SHELLS_SIGNAL + number))}
"""The ends of ranks, and of wrappers around them, that the launcher ends after a failure: by SIGTERM, then SIGKILL, or
by the signal that the launcher gets meanwhile: SIGHUP, SIGINT or SIGQUIT."""
_SOON_S: Final = 60.0  # a cause is seen at most this long after its consequences
# What gloo, NCCL and torch's store say of another rank: "[…/gloo/transport/tcp/pair.cc:537] Read error [::1]:41217:
# Connection reset by peer", "Connection was likely closed", "ncclRemoteError: … a remote process exiting prematurely".
_LOST_PEER: Final = re.compile(
    r"(closed|reset) by (remote )?peer|connection was likely closed|remote process exit|ncclRemoteError|broken pipe",
    re.IGNORECASE,
)
_SILENT_PEER: Final = re.compile(
    r"timed out waiting .*for (send|recv)|collective operation timeout|failed to pass monitoredBarrier", re.IGNORECASE
)
_NAMES_COLLECTIVES: Final = re.compile(r"\bgloo\b|nccl|\bDist(Backend|Network|Store)?Error\b", re.IGNORECASE)
_FRAME_OF_COLLECTIVES: Final = re.compile(r'  File ".*/torch/distributed/(distributed_c10d|rendezvous)\.py"')


# --- what a rank recorded --------------------------------------------------------------------------------------------

_MOST_CHARS: Final = 1 << 17  # of a longer text, half as many of its beginning and of its end are read
_BEGIN: Final = "Traceback (most recent call last):"
_DIRECT_CAUSE: Final = "The above exception was the direct cause of the following exception:"
_LINKS: Final = (_DIRECT_CAUSE, "During handling of the above exception, another exception occurred:")
_GROUP_MARGIN: Final = re.compile(r"^  [|+] ")
_MEMBER: Final = re.compile(r" +\+-[+-]-+ (\d+|\.\.\.) -+")
# ExceptionWrapper of torch, which numapin's DataLoader uses, too, raises an exception of another process again.
_CAUGHT: Final = re.compile(r"\S+: Caught \S+ (?P<where>.+)\.")
_ORIGINAL: Final = "Original "
_DUMPED_FRAME: Final = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')
_NUMAPIN: Final = re.escape(__file__.rsplit("/", 2)[0])  # a user's folder may have this name, too
LIBRARY: Final = re.compile(rf"/(site|dist)-packages/|/lib(64)?/python\d\.\d+t?/|^{_NUMAPIN}/|^<(?!stdin>)")
"""Finds paths of packages, of Python and of numapin."""


class RaisedException(NamedTuple):
    """An exception in the text of a traceback."""

    frames: list[str]
    message: str  # its type and its text, maybe several lines
    members: list[str]  # the first lines of the exceptions in a group, and of those in groups in it
    is_direct_cause: bool  # the next exception was raised from it


def chain_of(traceback: str) -> list[RaisedException]:
    """Return the exceptions of a traceback, the last of which is the one that ended the program.

    The text of one that torch raises again ("Caught ValueError in DataLoader worker process 0.") ends with the original
    traceback, whose exceptions follow it. A traceback in the text of any other exception is a part of that text.
    """
    lines = [_GROUP_MARGIN.sub("", line) for line in _bounded(traceback).split("\n")]
    begins = [0]
    for number, line in enumerate(lines[1:], 1):
        if line.startswith(_ORIGINAL) and _CAUGHT.fullmatch(lines[number - 1]):
            lines[number] = line.removeprefix(_ORIGINAL)
            begins.append(number)
        elif number > 1 and lines[number - 2] in _LINKS:
            begins.append(number)
    chain = []
    for begin, end in pairwise([*begins, len(lines)]):
        body = lines[begin + lines[begin].endswith(_BEGIN) : end]
        frames = list(takewhile(lambda line: line.startswith("  "), body))
        rest = body[len(frames) :]
        message = list(takewhile(lambda line: line not in _LINKS and not _MEMBER.fullmatch(line), rest))
        members = _members(rest[len(message) :])
        chain.append(RaisedException(frames, "\n".join(message).strip(), members, _DIRECT_CAUSE in rest))
    return chain


def _bounded(text: str) -> str:
    if len(text) <= _MOST_CHARS:
        return text
    return f"{text[: _MOST_CHARS // 2]}\n{text[-_MOST_CHARS // 2 :]}"


def _members(lines: Iterable[str]) -> list[str]:
    members: list[str] = []
    is_next = False
    for line in lines:
        text = line.lstrip().removeprefix("|").removeprefix(" ")
        if _MEMBER.fullmatch(line):
            is_next = True
        elif text in _LINKS and members:
            members.pop()  # what led to the member
            is_next = True
        elif is_next and text and not text.startswith(" ") and not text.endswith(_BEGIN):
            members.append(text)
            is_next = False
    return members


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRank:
    """The end of a rank. Times are seconds since the epoch, None if unknown."""

    local_rank: int
    rank: int
    pid: int
    exitcode: int  # or the negated signal number
    ended_s: float  # when the launcher saw it
    was_ended: bool  # it was running when another rank failed, so the launcher ended it
    error_file: str
    error: object  # the JSON in that file, None if there is none
    asked_s: float | None = None  # when the launcher sent it the first signal to end
    is_left: bool = False  # still there after SIGKILL; `exitcode` is then that of the kill
    logs: tuple[str, ...] = ()  # the files with its output, if that was redirected
    is_disk_full: bool = False  # the file system of these files and of its error file has less than 1 MiB left
    stack: str = ""  # where it was when another rank had failed, as faulthandler writes it
    gpu: int | None = None
    node: int | None = None  # of its GPU, or the one that it was given

    @property
    def _recorded(self) -> object:
        """The error that ended it, None if there is none.

        A wrapper that runs on after its Python has failed, e.g. a shell script, did not end of that. Nor did one that
        a signal ended, or that ended with the status of a later program that a signal ended.
        """
        pid, time_s = (_field(self.error, "message", "extraInfo", name) for name in ("pid", "time_s"))
        is_of_wrapped = isinstance(pid, int) and pid != self.pid
        is_late = isinstance(time_s, float) and self.ended_s - time_s > _SOON_S
        ran_on = is_late or self.was_ended or not 0 <= self.exitcode < 128
        return None if is_of_wrapped and ran_on else self.error

    @property
    def _message(self) -> str:
        """The type and the text of the exception that it recorded, "" if it recorded none."""
        message = _field(self._recorded, "message")
        text = _field(message, "message") if isinstance(message, Mapping) else message
        return _bounded(text).strip() if isinstance(text, str) else ""

    @property
    def exception(self) -> str:
        """The last part of a traceback, such as "KeyError: 'x'", before torch raised it again; "" if there is none."""
        return (self.raised_in and self.chain[-1].message) or self._message

    @property
    def raised_in(self) -> str:
        """The other process or thread that raised the exception: "in DataLoader worker process 0"; "" if none."""
        caught = _CAUGHT.fullmatch(self._message.partition("\n")[0])
        return caught["where"] if caught else ""

    @property
    def raised_from(self) -> str:
        """The first line of the exception at the root of `raise … from …`; "" if there is none."""
        root = ""
        for raised in reversed(self.chain[:-1]):
            # What multiprocessing calls a cause is the other process's traceback of the same exception.
            if not raised.is_direct_cause or "RemoteTraceback" in raised.message:
                break
            root = raised.message.partition("\n")[0]
        return root

    @property
    def chain(self) -> list[RaisedException]:
        """The exceptions of the traceback; the last is the one that ended the program."""
        return chain_of(self.traceback or self._message)

    @property
    def was_in(self) -> str:
        """Its innermost function, and the user's innermost line, at the failure: "barrier, train.py:8"; else ""."""
        frames = [found for line in self.stack.split("\n") if (found := _DUMPED_FRAME.fullmatch(line))]
        if not frames:
            return ""
        own = next((frame for frame in frames if not LIBRARY.search(frame["path"])), frames[0])
        place = f"{own['path'].rpartition('/')[2]}:{own['line']}"
        return place if frames[0]["function"] == "<module>" else f"{frames[0]['function']}, {place}"

    @property
    def traceback(self) -> str:
        """The whole traceback, "" if the rank recorded none."""
        text = _field(self._recorded, "message", "extraInfo", "py_callstack")
        return text.strip("\n") if isinstance(text, str) else ""

    @property
    def raised_s(self) -> float | None:
        """When it recorded its exception. None: unknown, or known to the second, as torch's @record notes it."""
        return self._time("time_s")

    @property
    def failed_s(self) -> float:
        """When it failed. What a rank recorded may be long before its process ended."""
        if self.raised_s is not None:
            return min(self.ended_s, self.raised_s)
        whole = self._time("timestamp")
        return self.ended_s if whole is None else min(self.ended_s, max(0, int(whole)) + 1)

    def _time(self, name: str) -> float | None:
        is_torchs = isinstance(_field(self._recorded, "message"), Mapping)
        found = _field(self._recorded, "message", "extraInfo", name) if is_torchs else _field(self._recorded, name)
        try:
            seconds = float(str(found))
        except ValueError:
            return None
        return seconds if isfinite(seconds) else None

    @property
    def signal_number(self) -> int | None:
        """The signal that ended it, or that ended the program below it, as wrappers report. None: no signal."""
        if self.exitcode < 0:
            return -self.exitcode
        number = self.exitcode - _SHELLS_SIGNAL
        return number if number in {*map(int, signal.Signals)} else None

    @property
    def end(self) -> str:
        """How the process ended: "exit status 3", "SIGKILL"."""
        if self.is_left:
            return "still there after SIGKILL"
        if self.exitcode < 0:
            return name_of_signal(-self.exitcode)
        below = f" (a program below it: {name_of_signal(self.signal_number)})" if self.signal_number else ""
        return f"exit status {self.exitcode}{below}"

    @property
    def has_our_end(self) -> bool:
        """Whether it was ended, and ended as ranks do that the launcher ends."""
        return self.was_ended and self.exitcode in _ENDINGS

    @property
    def failed_by_itself(self) -> bool:
        """Whether it has failed, and not because the launcher was ending it.

        A rank that was running when the first failure was seen can have failed before: Python takes its time to end.
        The exact time of its exception says so.
        """
        has_raised_before = self.raised_s is not None and (self.asked_s is None or self.raised_s <= self.asked_s)
        return self.state == "failed" and (not self.was_ended or has_raised_before)

    @property
    def state(self) -> str:
        """One of "finished", "failed" (by itself, maybe while it was ended), "ended" by the launcher, and "left"."""
        if self.is_left:
            return "left"
        if not self.was_ended:
            return "failed" if self.exitcode else "finished"
        has_raised = self.exception != "" and not self.exception.startswith("KeyboardInterrupt")  # made of a signal
        return "ended" if self.has_our_end and not has_raised else "failed"

    @property
    def blames_peer(self) -> str:
        """The words about another rank in its exception, or in one before it: "lost its connection to"; else ""."""
        for raised in reversed(self.chain):
            where = next((line for line in reversed(raised.frames) if line.startswith('  File "')), "")
            # Others are not about ranks: a file server, a database or a pipe may break a connection, too.
            if _NAMES_COLLECTIVES.search(raised.message) or _FRAME_OF_COLLECTIVES.match(where):
                if _LOST_PEER.search(raised.message):
                    return "lost its connection to"
                if _SILENT_PEER.search(raised.message):
                    return "timed out waiting for"
        return ""

    def to_json(self) -> dict[str, object]:
        """Return the rank as the report file has it."""
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "pid": self.pid,
            "gpu": self.gpu,
            "node": self.node,
            "state": self.state,
            "exit_status": self.exitcode if self.exitcode >= 0 else None,
            "signal": name_of_signal(-self.exitcode) if self.exitcode < 0 and not self.is_left else None,
            "exception": self.exception or None,
            "raised_in": self.raised_in or None,
            "raised_from": self.raised_from or None,
            "members": self.chain[-1].members,
            "traceback": self.traceback or None,
            "error_file": self.error_file if self.error is not None else None,
            "logs": [*self.logs],
            "was_in": self.was_in or None,
            "stack": self.stack or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """The failure of a job, as this host saw it."""

    program: str  # as the user typed it
    host: str
    ranks: tuple[EndedRank, ...]  # of this host, in the order in which they failed; the others follow
    why_first: str = ""  # why the first is not the one whose failure has the earliest time
    is_only_host: bool = True
    is_settled: bool = False  # all hosts agree on the first failure
    elsewhere: HostFailure | None = None  # the first failure, if it was not on this host
    out_of_memory: str | None = None  # what the kernel's out-of-memory killer did
    out_of_memory_advice: str = ""
    shm_bytes: int | None = None  # the size of /dev/shm, and its used share when the failure was seen; None: unknown
    shm_used: float | None = None

    @property
    def first(self) -> EndedRank:
        """The rank that failed first on this host; if the job failed elsewhere, it may only have been ended."""
        return self.ranks[0]

    @property
    def where(self) -> str:
        """The words that say among which ranks the first was the first; "" if among all."""
        return "" if self.is_only_host or self.is_settled else " on this host"

    @property
    def summary(self) -> str:
        """The first failure in one line."""
        if self.elsewhere:
            return f"{self.elsewhere.name} failed first: {self.elsewhere.reason}"
        reason = self.first.exception.partition("\n")[0][:_SUMMARY_CHARS] or self.first.end
        return f"rank {self.first.rank} failed first{self.where}: {reason}"

    def to_json(self) -> dict[str, object]:
        """Return the account as the report file has it."""
        cause, advice, elsewhere = "", "", None
        if self.elsewhere is None:
            cause, advice = likely_cause(self)
        else:
            names = ("host", "number", "rank", "reason")
            elsewhere = {name: getattr(self.elsewhere, name) for name in names}
        return {
            "program": self.program,
            "host": self.host,
            "is_only_host": self.is_only_host,
            "time_s": self.first.failed_s,
            "first": self.first.rank,
            "elsewhere": elsewhere,
            "why_first": self.why_first or None,
            "cause": cause or None,
            "advice": advice or None,
            "ranks": [rank.to_json() for rank in self.ranks],
        }


class RanksFailed(RankError):  # noqa: N818 - the event, as in BindingRefused
    """Ranks of `numapin run` failed; `failure` is the account of it."""

    def __init__(self, failure: JobFailure) -> None:
        super().__init__(f"{failure.program}: {failure.summary}", "see what it printed, above")
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the account, of which the message is made."""
        return type(self), (self.failure,)


def in_order(ranks: Iterable[EndedRank], *, is_only_host: bool) -> tuple[tuple[EndedRank, ...], str]:
    """Return the ranks in the order in which they failed, and why the first is not the earliest; "" if it is.

    If the earliest failures are exceptions about another rank, the first is the earliest failure of another kind. A
    rank that dies closes its connections before its end is seen: GPU drivers and core dumps take their time. One that
    raises may close them in a `finally`, before its exception has left the program.
    """

    def by_failure(rank: EndedRank) -> tuple[bool, bool, bool, float]:
        return rank.state == "finished", not rank.failed_by_itself, rank.state != "failed", rank.failed_s

    order = sorted(ranks, key=by_failure)
    consequences = list(takewhile(lambda rank: rank.failed_by_itself and rank.blames_peer, order))
    if not consequences:
        return tuple(order), ""
    begun, rest = order[0], order[len(consequences) :]
    causes = [
        rank
        for rank in rest
        if rank.failed_by_itself and not rank.blames_peer and rank.failed_s - begun.failed_s <= _SOON_S
    ]
    # A rank that aborted may be a consequence, too. It counts if there is nothing else and no other host.
    certain = [rank for rank in causes if rank.exception or rank.signal_number != signal.SIGABRT]
    first = next(iter(certain or (causes if is_only_host else [])), None)
    if first is not None:
        earlier_s = first.failed_s - begun.failed_s
        what = f"the {'exception' if first.exception else 'end'} of rank {first.rank}"
        before = f"rank {begun.rank} failed {earlier_s:.1f} s before {what} was seen"
        why = f"{before}, but because it {begun.blames_peer} another rank"
        return (first, *(rank for rank in order if rank is not first)), why
    suspects = [rank.rank for rank in rest if rank.state != "failed"]
    where = [listed("rank", suspects)] if suspects else []
    where += [] if is_only_host else ["the other hosts"]
    why = f"it {begun.blames_peer} another rank; look also at {' and '.join(where)}" if where else ""
    return tuple(order), why


def name_of_signal(number: int | None) -> str:
    """Return "SIGTERM", or "signal 40" for one without a name."""
    try:
        return signal.Signals(number or 0).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _field(found: object, *names: str) -> object:
    """Return what is at a path in nested mappings, None if there is nothing."""
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


# --- the likely cause ------------------------------------------------------------------------------------------------

# torch/utils/data/dataloader.py and torch/csrc/DataLoader.cpp
_WORKER: Final = re.compile(
    r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (is killed by signal: (?P<signal>[^.]*)|exited unexpectedly)"
)
_EXIT_CODE: Final = re.compile(r"DataLoader worker .* exited unexpectedly with exit code")
_LOST_CONNECTION: Final = re.compile(
    r"(EOFError|ConnectionResetError|ConnectionRefusedError|BrokenPipeError|FileNotFoundError)"
)
_READS_TENSOR: Final = "in rebuild_storage_fd"  # torch/multiprocessing/reductions.py
_READS_BATCH: Final = "in _try_get_data"  # torch/utils/data/dataloader.py
_SIGNAL_BY_DESCRIPTION: Final = {signal.strsignal(number): int(number) for number in signal.Signals}
_SEE_FRAMES: Final = "see the Python lines where it happens: PYTHONFAULTHANDLER=1 numapin run …"
# aten/src/ATen/MapAllocator.cpp: "unable to allocate shared memory(shm) for file </torch_4711_…>: No space left on
# device (28)"; Python: "[Errno 28] No space left on device: '/dev/shm/…'"
_NO_SHM: Final = re.compile(r"(shared memory|</?torch_).*No space left on device|No space left on device: '/dev/shm/")
_NO_DESCRIPTORS: Final = re.compile(r"unable to open shared memory object .*Too many open files")
_FULL: Final = 0.9
_SHM_ADVICE: Final = "docker run --shm-size=8g, or numapin run --dataloader=numapin, which does not need it"
_CAUSE_OF_SIGNAL: Final[Mapping[int, tuple[str, str]]] = {
    signal.SIGKILL: (
        "a scheduler, a user, or the kernel when the host is short of memory",
        "look for out-of-memory kills in dmesg, and for limits in the scheduler's log",
    ),
    signal.SIGBUS: ("a file that is mapped into memory was truncated, or its file system is full", _SEE_FRAMES),
    signal.SIGSEGV: ("native code used invalid memory: an extension, a library or the driver", _SEE_FRAMES),
    signal.SIGABRT: (
        "native code gave up: a failed check, or an NCCL collective that timed out",
        f"its message is in the output above; {_SEE_FRAMES}",
    ),
    **dict.fromkeys(
        (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
        ("another process sent it; numapin did not", ""),
    ),
}


def likely_cause(failure: JobFailure) -> tuple[str, str]:  # noqa: PLR0911 - one return per case
    """Return what probably ended the first rank, or its DataLoader worker, and what to do next; empty if unknown."""
    rank, number = failure.first, failure.first.signal_number
    used = _field(rank.error, "message", "extraInfo", "shm_used")  # when it recorded its exception
    is_shm_full = max(failure.shm_used or 0, used if isinstance(used, float) else 0) > _FULL
    size = "" if failure.shm_bytes is None else f"; it has {failure.shm_bytes >> 20:,} MiB here"
    full_shm = f"/dev/shm, through which DataLoader workers send batches, is full{size}", _SHM_ADVICE  # noqa: S108
    if rank.exception:
        if _NO_SHM.search(rank.exception):
            return full_shm
        if _NO_DESCRIPTORS.search(rank.exception):
            what = "the limit on open files: each tensor from a DataLoader worker has one"
            return what, "raise it with: ulimit -n 65536"

        # torch often says only that a worker "exited unexpectedly". The exception before that one then has the signal.
        # If the worker dies while its batch is read, the exception may not mention it at all. Other queues of tensors
        # fail in the same function, so the DataLoader must be among the frames.
        last = "\n".join(rank.chain[-1].frames)
        is_of_batch = _READS_TENSOR in last and _READS_BATCH in last and _LOST_CONNECTION.match(rank.exception)
        if not is_of_batch and not _WORKER.search(rank.exception):
            return "", ""
        texts = f"{rank.traceback}\n{rank.exception}"
        signals = [found["signal"] for found in _WORKER.finditer(texts) if found["signal"]]
        if not signals:
            if _EXIT_CODE.search(texts):
                return "", ""
            if failure.out_of_memory:
                return failure.out_of_memory, failure.out_of_memory_advice
            if is_shm_full:
                return full_shm
            return "", ""
        number = _SIGNAL_BY_DESCRIPTION.get(signals[-1])
        if number is None:
            return "", ""
    if number is None:
        if rank.logs and rank.is_disk_full:
            what = "the file system of its logs has less than 1 MiB left"
            return what, "free space there, or choose another folder with --log-dir DIR"
        return "", ""
    if number == signal.SIGKILL and failure.out_of_memory:
        return failure.out_of_memory, failure.out_of_memory_advice
    if number == signal.SIGBUS and is_shm_full:
        return full_shm
    return _CAUSE_OF_SIGNAL.get(number, ("", ""))
