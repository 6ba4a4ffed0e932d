"""The account of ranks that failed: which was the first, why, and what the others did."""

from __future__ import annotations

import pickle
import signal
import traceback
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined] # typeshed leaves it out
from typing import Any, TypeVar

import pytest

from numapin.errors import Stopped
from tests.unit.launcher.seam import EndedRank, JobFailure, RanksFailed, in_order, likely_cause

Raised = TypeVar("Raised", bound=BaseException)
TRACEBACK = "Traceback (most recent call last):\n  File\nKeyError: 'x'\n"
MESSAGE = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": TRACEBACK}}


def ended(rank: int, exitcode: int, **changes: Any) -> EndedRank:
    """Return the end of a rank."""
    given = {"ended_s": 100.0, "was_ended": False, "error_file": f"/run/error-{rank}.json", "error": None}
    return EndedRank(local_rank=rank, rank=rank, pid=1000 + rank, exitcode=exitcode, **{**given, **changes})


def at(seconds: float, field: str = "timestamp") -> dict[str, Any]:
    """Return a recorded error with a time, as torch's @record writes it, or our own record (`time_s`)."""
    extra = {**MESSAGE["extraInfo"], field: str(seconds)}  # type: ignore[dict-item]
    return {"message": {**MESSAGE, "extraInfo": extra}}


def failure(*ranks: EndedRank, **facts: Any) -> JobFailure:
    """Return the account of these ranks."""
    order, why_first = in_order(ranks, is_only_host=facts.get("is_only_host", True))
    return JobFailure(program="train.py", host="node7", ranks=order, why_first=why_first, **facts)


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([ended(0, 0), ended(1, 3), ended(2, -15, was_ended=True)], 1),
        ([ended(0, 1, ended_s=101.0), ended(1, 1, ended_s=100.9)], 1),
        ([ended(0, 1, ended_s=101.0), ended(1, 1, ended_s=108.0, error=at(99))], 1),
        ([ended(0, -9, ended_s=100.7), ended(1, 1, ended_s=100.9, error=at(100))], 0),
        ([ended(0, 1, ended_s=99.0, was_ended=True), ended(1, 1)], 1),
        ([ended(0, 1, error=at(99.8, "time_s")), ended(1, -15, was_ended=True, error=at(99.2, "time_s"))], 1),
        ([ended(0, 1, error=at(99.8, "time_s")), ended(1, 1, was_ended=True, error=at(100.2, "time_s"))], 0),
        ([ended(0, -9, ended_s=99.9), ended(1, 1, error=at(99.95, "time_s"))], 0),
        ([ended(0, 1, error=at(99), recorded_s=99.7), ended(1, 1, error=at(99), recorded_s=99.2)], 1),
        ([ended(0, 1, error=at(99), recorded_s=99.7), ended(1, -15, was_ended=True, error=at(99), recorded_s=99.2)], 1),
        ([ended(0, 1, error=at(99.8, "time_s")), ended(1, 1, error=at(99), recorded_s=98.99)], 1),
        ([ended(0, 1, error=at(99.8, "time_s")), ended(1, 1, error=at(99), recorded_s=40.0)], 0),
        ([ended(0, 1, error=at(99.8, "time_s")), ended(1, 1, error=at(99), recorded_s=160.0)], 0),
        ([ended(0, 1, error=at(float("nan"), "time_s")), ended(1, 1, error=at(float("inf")), ended_s=99)], 1),
    ],
    ids=[
        *("the only one", "seen first", "recorded first", "in the same second", "not one that was ended"),
        *("slow to end", "failed when it was ended", "its peer's exception"),
        *("files' times", "file's time of one that was ended", "clock's tick", "another clock", "written again"),
        "no times",
    ],
)
def test_first(ranks: list[EndedRank], first: int) -> None:
    """The first failure is the one that happened first, by what the rank recorded or by when its end was seen."""
    found = failure(*ranks)
    assert found.first.rank == first
    assert {rank.rank for rank in found.ranks} == {rank.rank for rank in ranks}


LOST = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:41217",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:41217: Connection reset "
    "by peer. This is typically caused by a remote worker hanging or bugs in the application.",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote",
    "torch.distributed.DistBackendError: NCCL error in: …, remote process exited or there was a network error",
)
SILENT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:81] Timed out waiting 1800000ms for recv",
    "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception: \n[/gloo/x.cc:1]",
    "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) …",
)


def lost(rank: int, seconds: float, text: str = LOST[0], trace: str = "", **changes: Any) -> EndedRank:
    """Return the end of a rank that lost its connection to another at this time."""
    error = {"message": {"message": text, "extraInfo": {"py_callstack": trace or text, "time_s": seconds}}}
    return ended(rank, 1, error=error, **changes)


RESET = "RuntimeError: Connection reset by peer"
IN_TORCH = 'Traceback (most recent call last):\n  File "/v/torch/distributed/{}", line 7, in barrier\n    work.wait()\n'
IN_SOURCE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    log("closed by peer")\nKeyError: 1'
BEFORE = f"Traceback (most recent call last):\n{LOST[0]}\n\nDuring …:\n\nTraceback (most recent call last):\nE: x"


@pytest.mark.parametrize("text", [*LOST, *SILENT])
def test_the_silent_rank_was_first(text: str) -> None:
    """A rank that ended without a word comes before the peers whose exceptions say that they lost it."""
    found = failure(lost(0, 98.5, text), ended(1, -11, ended_s=99.0), lost(2, 98.7, text))
    assert [rank.rank for rank in found.ranks] == [1, 0, 2]
    problem = "lost its connection to" if text in LOST else "timed out waiting for"
    assert found.why_first == (
        f"rank 0 failed 0.5 s before the end of rank 1 was seen, but because it {problem} another rank"
    )


@pytest.mark.parametrize(
    "text",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",  # a file server
        "BrokenPipeError: [Errno 32] Broken pipe",  # the reader of stdout
        "TimeoutError: timed out waiting 60 s for recv",
        "botocore.exceptions.ConnectionClosedError: Connection was closed by peer",
    ],
)
def test_a_connection_to_something_else(text: str) -> None:
    """Only what torch's collectives say is about another rank."""
    found = failure(lost(0, 98.5, text), ended(1, -11, ended_s=99.0))
    assert (found.first.rank, found.why_first) == (0, "")


def test_what_a_wrapper_survived() -> None:
    """An exception of a Python below a wrapper counts if the wrapper ends soon after it, by itself."""

    def wrapper(pid: int, seconds: float, **changes: Any) -> EndedRank:
        error = {"message": {"message": "KeyError", "extraInfo": {"pid": pid, "time_s": seconds}}}
        return ended(0, changes.pop("exitcode", 3), error=error, **changes)

    for exitcode in (128 + signal.SIGSEGV, -signal.SIGSEGV):  # of a later program, as shells report it; or its own
        assert wrapper(77, 99.0, exitcode=exitcode).exception == ""
    assert wrapper(77, 99.0).exception == wrapper(1000, 9.0).exception == "KeyError"
    assert wrapper(77, 9.0).exception == wrapper(77, 99.0, was_ended=True).exception == ""
    assert wrapper(1000, 99.0, was_ended=True).exception == "KeyError"


def test_what_follows_our_signal_is_last() -> None:
    """What a rank raises after numapin has told it to end is no cause, whatever the first failure says."""
    late = ended(1, 1, was_ended=True, asked_s=98.6, error=at(98.9, "time_s"))
    assert [rank.rank for rank in failure(late, lost(0, 98.5)).ranks] == [0, 1]
    assert (late.state, late.failed_by_itself) == ("failed", False)
    before = ended(1, 1, was_ended=True, asked_s=98.95, error=at(98.9, "time_s"))
    assert failure(before, lost(0, 98.5)).first.rank == 1


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([lost(0, 98.5), ended(1, 3, ended_s=99)], 1),
        ([lost(0, 98.5), ended(1, -6, ended_s=98.9), ended(2, -11, ended_s=99)], 2),
        ([lost(0, 98.5), ended(1, -6, ended_s=98.9)], 1),
        ([lost(0, 98.5), ended(1, -11, was_ended=True)], 0),
        ([lost(0, 98.5), ended(1, 1, error=at(98.9, "time_s")), ended(2, 3, ended_s=99)], 1),
        ([lost(0, 98.5), ended(1, -15, was_ended=True, error=at(98.9, "time_s"))], 1),
        ([lost(0, 98.5), lost(1, 98.6, SILENT[0]), ended(2, -9, ended_s=99)], 2),
        ([lost(0, 98.5), ended(1, -9, ended_s=98.5 + 61)], 0),
        ([ended(0, 1, error=at(98.5, "time_s")), ended(1, -11, ended_s=99)], 0),
        ([lost(0, 99), ended(1, -11, ended_s=98.5)], 1),
        ([lost(0, 98.5, RESET, IN_TORCH.format("distributed_c10d.py") + RESET), ended(1, -11, ended_s=99.0)], 1),
        ([lost(0, 98.5, RESET, IN_TORCH.format("checkpoint/filesystem.py") + RESET), ended(1, -11, ended_s=99.0)], 0),
        ([lost(0, 98.5, "KeyError: 1", IN_SOURCE), ended(1, -9, ended_s=99)], 0),
        ([lost(0, 98.0, "E: x", BEFORE), ended(1, -9)], 1),
    ],
    ids=[
        *("exit status", "an abort may be a consequence", "only an abort", "a crash while it was ended"),
        *("another exception", "an exception while it was ended", "a collective that timed out", "long afterwards"),
        *("no lost connection", "seen first", "a frame of the collectives", "a frame of a checkpoint"),
        *("a word in the source", "a lost connection before the last exception"),
    ],
)
def test_which_is_the_cause(ranks: list[EndedRank], first: int) -> None:
    """Only a rank that failed by itself can be the cause; why it is named first is said if its time does not."""
    found = failure(*ranks)
    assert found.first.rank == first
    by_time = min(ranks, key=lambda rank: (rank.state != "failed", rank.failed_s)).rank
    assert bool(found.why_first) == (found.to_json()["why_first"] is not None) == (by_time != first)


@pytest.mark.parametrize(
    ("others", "is_only_host", "where"),
    [
        ([ended(1, -15, was_ended=True), ended(2, 0)], True, "ranks 1-2"),
        ([ended(1, -9, was_ended=True, is_left=True)], False, "rank 1 and the other hosts"),
        ([lost(1, 98.7)], False, "the other hosts"),
    ],
)
def test_where_to_look_without_a_cause(others: list[EndedRank], where: str, *, is_only_host: bool) -> None:
    """If no rank reports why a connection was lost, the ranks are named that may know."""
    found = failure(lost(0, 98.5), *others, is_only_host=is_only_host)
    assert found.first.rank == 0
    assert found.why_first == f"it lost its connection to another rank; look also at {where}"
    assert failure(lost(0, 98.5), lost(1, 98.7)).why_first == ""


def test_an_interrupted_rank_has_not_failed() -> None:
    """Ctrl-C while a failed job ends interrupts the ranks that are left."""
    error = {"message": {"message": "KeyboardInterrupt", "extraInfo": {"py_callstack": "", "time_s": 99}}}
    states = [ended(0, end, was_ended=True, error=error).state for end in (1, -2, 130)]
    assert (states[1:], ended(0, -1, was_ended=True).state) == (["ended", "ended"], "ended")


def test_an_abort_with_other_hosts() -> None:
    """If the lost peer may be on another host, a rank that aborted may have lost it, too."""
    ranks = (lost(0, 98.5), ended(1, -6, ended_s=99))
    assert (failure(*ranks).first.rank, failure(*ranks, is_only_host=False).first.rank) == (1, 0)


@pytest.mark.parametrize(
    ("error", "exception", "traceback"),
    [
        (None, "", ""),
        (at(9), "KeyError: 'x'", TRACEBACK.strip("\n")),
        ({"message": "just text", "timestamp": 5}, "just text", ""),
        ({"message": {"message": "no stack", "extraInfo": {}}}, "no stack", ""),
        (["not", "torch's"], "", ""),
        ({"message": {"extraInfo": 7}, "timestamp": "soon"}, "", ""),
        ({"message": {"message": 7, "extraInfo": {"py_callstack": ["x"], "timestamp": {}}}}, "", ""),
    ],
    ids=["nothing", "torch's", "text", "no stack", "no mapping", "other types", "more other types"],
)
def test_what_a_rank_recorded(error: object, exception: str, traceback: str) -> None:
    """An error file that torch did not write does not break the account."""
    rank = ended(1, 1, error=error)
    assert (rank.exception, rank.traceback) == (exception, traceback)
    assert rank.failed_s <= 100


@pytest.mark.parametrize(
    ("exitcode", "end", "number"),
    [
        (3, "exit status 3", None),
        (-9, "SIGKILL", 9),
        (-40, "signal 40", 40),
        (137, "exit status 137 (a program below it: SIGKILL)", 9),
        (255, "exit status 255", None),
    ],
)
def test_end(exitcode: int, end: str, number: int | None) -> None:
    """Signals have names, also those that a wrapper's exit status stands for."""
    rank = ended(0, exitcode)
    assert (rank.end, rank.signal_number) == (end, number)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"exitcode": 0}, "finished"),
        ({"exitcode": 1}, "failed"),
        ({"exitcode": 0, "was_ended": True}, "ended"),
        ({"exitcode": -15, "was_ended": True}, "ended"),
        ({"exitcode": -9, "was_ended": True}, "ended"),
        ({"exitcode": 143, "was_ended": True}, "ended"),
        ({"exitcode": 1 - signal.SIGRTMAX, "was_ended": True}, "ended"),
        ({"exitcode": -11, "was_ended": True}, "failed"),
        ({"exitcode": 3, "was_ended": True}, "failed"),
        ({"exitcode": -9, "was_ended": True, "is_left": True}, "left"),
        ({"exitcode": 1, "was_ended": True, "error": at(9)}, "failed"),
    ],
)
def test_state(changes: dict[str, Any], state: str) -> None:
    """A rank has finished, failed, or was ended; one that was ended while it failed counts as failed."""
    assert ended(0, **changes).state == state


BEGIN = "Traceback (most recent call last):\n"
READS_TENSOR = '  File "torch/multiprocessing/reductions.py", line 538, in rebuild_storage_fd\n'
READS_BATCH = f'  File "torch/utils/data/dataloader.py", line 1291, in _try_get_data\n{READS_TENSOR}'
FULL = {"shm_bytes": 64 << 20, "shm_used": 0.95}
NO_SHM = "RuntimeError: unable to allocate shared memory(shm) for file </torch_48_1_0>: No space left on device (28)"
NO_FILE = (
    "RuntimeError: unable to open shared memory object </torch_48_1_0> in read-write mode: Too many open files (24)"
)
EXITED = "RuntimeError: DataLoader worker (pid(s) 1, 2) exited unexpectedly"
WORKER = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: {}. "


@pytest.mark.parametrize(
    ("end", "facts", "cause", "advice"),
    [
        (-9, {"out_of_memory": "memory", "out_of_memory_advice": "less"}, "memory", "less"),
        (-9, {}, "short of memory", "dmesg"),
        (-7, {"shm_bytes": 64 << 20, "shm_used": 0.97}, "is full; it has 64 MiB here", "--dataloader=numapin"),
        (-7, {"shm_bytes": 64 << 20, "shm_used": 0.5}, "truncated", "PYTHONFAULTHANDLER=1"),
        (-11, {}, "invalid memory", "PYTHONFAULTHANDLER=1"),
        (134, {}, "NCCL", "its message is in the output above"),
        (-15, {}, "another process sent it", ""),
        *((-number, {}, " ", "") for number in signal.Signals),
        (127, {}, "not found", "PATH"),
        (3, {}, "", ""),
        (WORKER.format("Killed"), {"out_of_memory": "memory", "out_of_memory_advice": "less"}, "memory", "less"),
        (WORKER.format("Killed"), {}, "short of memory", "dmesg"),
        (f"{WORKER.format('Bus error')}It is possible that …", FULL, "it has 64 MiB", "--shm-size"),
        (f"{WORKER.format('Bus error')}It is possible that …", {**FULL, "shm_used": 0.2}, "truncated", ""),
        (NO_SHM, {"shm_bytes": 64 << 20}, "is full; it has 64 MiB here", "--shm-size"),
        (
            f"RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal {BEGIN}{NO_SHM}",
            {},
            "full",
            "--shm",
        ),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", {}, "is full", "--shm-size"),
        ("OSError: [Errno 28] No space left on device: '/data/x'", FULL, "", ""),
        (NO_FILE, FULL, "open files", "ulimit -n"),
        (WORKER.format("Segmentation fault"), {}, "invalid memory", "PYTHONFAULTHANDLER=1"),
        (WORKER.format("Unheard of"), {"out_of_memory": "memory"}, "", ""),
        (EXITED, {"out_of_memory": "memory"}, "memory", ""),
        (EXITED, {}, "or was killed", "dmesg"),
        (EXITED, FULL, "is full", "--shm-size"),
        (f"{BEGIN}{READS_BATCH}EOFError", FULL, "full; it has 64 MiB", "--shm-size"),
        (f"{BEGIN}{READS_BATCH}EOFError", {}, "or was killed", ""),
        (f"{BEGIN}{READS_BATCH}ConnectionResetError: x", {"out_of_memory": "memory"}, "memory", ""),
        (f"{BEGIN}{READS_BATCH}KeyError: x", {"out_of_memory": "memory"}, "", ""),
        (f"{BEGIN}{READS_TENSOR}EOFError: of another queue of tensors", {"out_of_memory": "memory"}, "", ""),
        ("EOFError: of the script's own", {"out_of_memory": "memory"}, "", ""),
        ("RuntimeError: DataLoader worker (pid 1) exited unexpectedly with exit code 3.", {}, "", ""),
        (f"{BEGIN}{WORKER.format('Killed')}\n\n…\n\n{EXITED}", {}, "short of memory", ""),
        (f"{BEGIN}{EXITED} with exit code 3.\n\n…\n\n{EXITED}", {}, "", ""),
        ("ValueError: Killed", {"out_of_memory": "memory"}, "", ""),
    ],
)
def test_likely_cause(end: int | str, facts: dict[str, Any], cause: str, advice: str) -> None:
    """A signal has a likely cause and advice, and so has the exception about a DataLoader worker's end.

    An exit status of the script's own, and other exceptions, speak for themselves.
    """
    if isinstance(end, int):
        rank = ended(0, end)
    else:
        message = end.rpartition("\n")[2] if end.startswith(BEGIN) else end
        rank = ended(0, 1, error={"message": {"message": message, "extraInfo": {"py_callstack": end}}})
    found = likely_cause(failure(rank, **facts))
    assert cause in found[0]
    assert advice in found[1]
    assert bool(found[0]) == bool(cause)


def test_json_and_pickle() -> None:
    """The report has each rank's facts; unknown ones are null. The error can be pickled."""
    found = failure(ended(0, -15, was_ended=True), ended(1, 3), ended(2, 1, error=at(200)), ended(3, 0))
    written = found.to_json()
    assert (written["first"], written["cause"], written["time_s"]) == (1, None, 100.0)
    ranks: Any = written["ranks"]
    states = ["failed", "failed", "ended", "finished"]
    assert [(rank["rank"], rank["state"]) for rank in ranks] == [*zip((1, 2, 0, 3), states, strict=True)]
    assert [rank["exit_status"] for rank in ranks] == [3, 1, None, 0]
    assert [rank["signal"] for rank in ranks] == [None, None, "SIGTERM", None]
    assert [rank["exception"] for rank in ranks] == [None, "KeyError: 'x'", None, None]
    error = RanksFailed(found)
    assert error.message == "train.py: rank 1 failed first: exit status 3"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - ours
    assert (again.message, again.failure) == (error.message, found)
    stop = pickle.loads(pickle.dumps(Stopped(signal.SIGTERM)))  # noqa: S301 - ours
    assert (stop.message, stop.exit_code) == ("stopped by SIGTERM; all ranks have ended", 143)
    stop = pickle.loads(pickle.dumps(Stopped(signal.SIGTERM, "rank 0: still there")))  # noqa: S301 - ours
    assert stop.message == "stopped by SIGTERM; rank 0: still there"


def recorded(error: BaseException) -> EndedRank:
    """Return a rank that recorded this exception, as Python writes it."""
    message = "".join(traceback.format_exception_only(error)).strip()
    stack = "".join(traceback.format_exception(error))
    return ended(0, 1, error={"message": {"message": message, "extraInfo": {"py_callstack": stack, "time_s": 99.0}}})


def raised(error: Raised, cause: BaseException | None = None) -> Raised:
    """Return the exception after it was raised, from the cause if there is one."""
    try:
        raise error from cause
    except type(error) as caught:
        return caught


class OwnError(Exception):
    """An exception whose name has a module in a traceback."""


def again(error: BaseException, where: str) -> BaseException:
    """Return the exception that torch's ExceptionWrapper makes of an exception of another process."""
    stack = "".join(traceback.format_exception(error))
    return raised(type(error)(f"Caught {type(error).__name__} {where}.\nOriginal {stack}"))


@pytest.mark.parametrize(
    ("error", "exception"),
    [
        (ValueError("image 17.jpg is truncated"), "ValueError: image 17.jpg is truncated"),
        (ValueError("first\n\nsecond"), "ValueError: first\n\nsecond"),
        (ValueError(""), "ValueError"),
        (OwnError("text"), f"{__name__}.OwnError: text"),
        (ValueError("a tool said:\nTraceback (most recent call last):\n  File\nKeyError"), "ValueError: a tool said:"),
    ],
)
def test_an_exception_of_a_worker(error: Exception, exception: str) -> None:
    """It is the worker's own, with what it was raised from, and not the text that torch puts around it."""
    rank = recorded(again(raised(error, raised(OSError("cause"), KeyError("root"))), "in DataLoader worker process 3"))
    assert rank.exception.startswith(exception)
    assert (rank.raised_in, rank.raised_from) == ("in DataLoader worker process 3", "KeyError: 'root'")
    assert rank.to_json()["raised_in"] == rank.raised_in


def test_a_workers_exception_that_was_handled() -> None:
    """An exception of the program's own is not the worker's, although this is in the traceback."""
    error = again(raised(ValueError("x")), "in DataLoader worker process 3")
    try:
        try:
            raise error
        except ValueError:
            raise KeyError("own")  # noqa: B904 - this is what is tested
    except KeyError as caught:
        rank = recorded(caught)
    assert (rank.exception, rank.raised_in, rank.raised_from) == ("KeyError: 'own'", "", "")


@pytest.mark.parametrize(
    ("error", "raised_from", "members"),
    [
        (raised(ValueError("x")), "", []),
        (raised(ValueError("x"), OSError("y\nz")), "OSError: y", []),
        (
            raised(ValueError("x"), raised(ExceptionGroup("g", [OSError("y")]))),
            "ExceptionGroup: g (1 sub-exception)",
            [],
        ),
        (
            raised(ExceptionGroup("g", [raised(OSError("y"), KeyError("z")), ValueError("x\ny")])),
            "",
            ["OSError: y", "ValueError: x"],
        ),
        (
            raised(ExceptionGroup("g", [ExceptionGroup("h", [OSError("y")]), ValueError("x")]), KeyError("z")),
            "KeyError: 'z'",
            ["ExceptionGroup: h (1 sub-exception)", "OSError: y", "ValueError: x"],
        ),
        (
            raised(ExceptionGroup("g", [ValueError(str(n)) for n in range(20)])),
            "",
            [*(f"ValueError: {n}" for n in range(15)), "and 5 more exceptions"],
        ),
        (
            raised(
                ValueError("x"), RemoteTraceback('\n"""\nTraceback (most recent call last):\n  File\nKeyError: 3\n"""')
            ),
            "",
            [],
        ),
    ],
    ids=["alone", "cause", "group as cause", "chain in a group", "group in a group", "many", "multiprocessing's"],
)
def test_causes_and_members(error: BaseException, raised_from: str, members: list[str]) -> None:
    """The root of `raise … from …` and the members of a group are known."""
    rank = recorded(error)
    assert (rank.raised_from, rank.chain[-1].members) == (raised_from, members)


STACK = 'Stack (most recent call first):\n  File "{}", line 7 in {}\n  File "/home/ada/train.py", line 3 in main\n'


@pytest.mark.parametrize(
    ("stack", "was_in"),
    [
        ("", ""),
        ('Stack (most recent call first):\n  File "/home/ada/tr', ""),
        (STACK.format("/home/ada/data.py", "read"), "read, data.py:7"),
        (
            STACK.format("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "barrier"),
            "barrier, train.py:3",
        ),
        (STACK.format("/usr/lib/python3.12/threading.py", "wait"), "wait, train.py:3"),
        (STACK.format("<frozen importlib._bootstrap>", "_load"), "_load, train.py:3"),
        ('  File "/usr/lib64/python3.13t/a.py", line 7 in wait\n', "wait, a.py:7"),
        ('  File "/home/ada/train.py", line 7 in <module>\n', "train.py:7"),
    ],
)
def test_where_a_rank_was(stack: str, was_in: str) -> None:
    """The place has the innermost function, and the innermost line that is neither Python's nor a package's."""
    assert ended(0, -15, was_ended=True, stack=stack).was_in == was_in
