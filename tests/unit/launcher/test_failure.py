"""The account of ranks that failed: which was the first, why, what it raised, and the likely cause.

Each case is a sentence and the ends of a job's ranks. The account of each is recorded in failures.txt;
NUMAPIN_UPDATE_GOLDEN=1 records them again. The block that is printed: tests/recorded/failures.py.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined] # typeshed leaves it out
from pathlib import Path
from typing import Any, TypeVar

from numapin.errors import Stopped
from tests.recorded.screens import compare
from tests.unit.launcher.seam import EndedRank, JobFailure, RanksFailed, in_order, likely_cause

Raised = TypeVar("Raised", bound=BaseException)
Ranks = list[EndedRank]
TRACEBACK = "Traceback (most recent call last):\n  File\nKeyError: 'x'\n"


def ended(rank: int, exitcode: int = 1, **changes: Any) -> EndedRank:
    given = {"ended_s": 100.0, "was_ended": False, "error_file": f"/run/error-{rank}.json", "error": None}
    return EndedRank(local_rank=rank, rank=rank, pid=1000 + rank, exitcode=exitcode, **{**given, **changes})


def asked(rank: int, exitcode: int, **changes: Any) -> EndedRank:
    return ended(rank, exitcode, was_ended=True, **changes)


def error(text: str, trace: object = "", **extra: object) -> dict[str, Any]:
    return {"message": {"message": text, "extraInfo": {"py_callstack": trace, **extra}}}


def at(seconds: float, field: str = "time_s") -> dict[str, Any]:
    """Return a recorded error with a time, as our own record has it, or torch's @record ("timestamp")."""
    return error("KeyError: 'x'", TRACEBACK, **{field: str(seconds)})


def record_at(seconds: float) -> dict[str, Any]:
    """Return what torch's @record writes at a time, in whole seconds."""
    return at(seconds, "timestamp")


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
OF_OTHERS = (
    "ConnectionResetError: [Errno 104] Connection reset by peer",  # a file server
    "BrokenPipeError: [Errno 32] Broken pipe",  # the reader of stdout
    "TimeoutError: timed out waiting 60 s for recv",
    "botocore.exceptions.ConnectionClosedError: Connection was closed by peer",
)


def lost(rank: int = 0, seconds: float = 98.5, text: str = LOST[0], trace: str = "") -> EndedRank:
    """Return the end of a rank that lost its connection to another at this time."""
    return ended(rank, error=error(text, trace or text, time_s=seconds))


RESET = "RuntimeError: Connection reset by peer"
IN_TORCH = 'Traceback (most recent call last):\n  File "/v/torch/distributed/{}", line 7, in barrier\n    work.wait()\n'
IN_SOURCE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    log("closed by peer")\nKeyError: 1'
BEFORE = f"Traceback (most recent call last):\n{LOST[0]}\n\nDuring …:\n\nTraceback (most recent call last):\nE: x"

FIRST: dict[str, Ranks] = {
    "the only one that failed": [ended(0, 0), ended(1, 3), asked(2, -15)],
    "the one whose end was seen first": [ended(0, ended_s=101.0), ended(1, ended_s=100.9)],
    "the one that recorded first": [ended(0, ended_s=101.0), ended(1, ended_s=108.0, error=record_at(99))],
    "a death within a whole second": [ended(0, -9, ended_s=100.7), ended(1, ended_s=100.9, error=record_at(100))],
    "not one that was ended": [asked(0, 1, ended_s=99.0), ended(1)],
    "one that is slow to end": [ended(0, error=at(99.8)), asked(1, -15, error=at(99.2))],
    "not one that failed when it was ended": [ended(0, error=at(99.8)), asked(1, 1, error=at(100.2))],
    "a death before its peer's exception": [ended(0, -9, ended_s=99.9), ended(1, error=at(99.95))],
    "no numbers": [ended(0, error=at(float("nan"))), ended(1, error=record_at(float("inf")), ended_s=99)],
    "what follows our signal is last": [asked(1, 1, asked_s=98.6, error=at(98.9)), lost()],
    "what came before our signal is not": [asked(1, 1, asked_s=98.95, error=at(98.9)), lost()],
    "a silent rank before its peer": [lost(), ended(1, -11, ended_s=99.0), lost(2, 98.7)],
    **{f"about another rank: {text}": [lost(0, 98.5, text), ended(1, 3, ended_s=99.0)] for text in (*LOST, *SILENT)},
    **{f"not what is about no rank: {text}": [lost(0, 98.5, text), ended(1, -11, ended_s=99.0)] for text in OF_OTHERS},
    "an exit status is a cause": [lost(), ended(1, 3, ended_s=99)],
    "an abort may be a consequence": [lost(), ended(1, -6, ended_s=98.9), ended(2, -11, ended_s=99)],
    "an abort alone is the cause": [lost(), ended(1, -6, ended_s=98.9)],
    "a crash while it was ended is none": [lost(), asked(1, -11)],
    "another exception": [lost(), ended(1, error=at(98.9)), ended(2, 3, ended_s=99)],
    "an exception while it was ended": [lost(), asked(1, -15, error=at(98.9))],
    "a collective that timed out": [lost(), lost(1, 98.6, SILENT[0]), ended(2, -9, ended_s=99)],
    "an end long afterwards is no cause": [lost(), ended(1, -9, ended_s=98.5 + 61)],
    "no connection was lost": [ended(0, error=at(98.5)), ended(1, -11, ended_s=99)],
    "the cause was seen first": [lost(0, 99), ended(1, -11, ended_s=98.5)],
    "a reset in a frame of the collectives": [
        lost(0, 98.5, RESET, IN_TORCH.format("distributed_c10d.py") + RESET),
        ended(1, -11, ended_s=99.0),
    ],
    "a reset in a frame of a checkpoint": [
        lost(0, 98.5, RESET, IN_TORCH.format("checkpoint/filesystem.py") + RESET),
        ended(1, -11, ended_s=99.0),
    ],
    "a word in the source": [lost(0, 98.5, "KeyError: 1", IN_SOURCE), ended(1, -9, ended_s=99)],
    "a lost connection before the last exception": [lost(0, 98.0, "E: x", BEFORE), ended(1, -9)],
    "all have lost one": [lost(), lost(1, 98.7)],
    "look at the ranks that may know": [lost(), asked(1, -15), ended(2, 0)],
}  # fmt: skip
OF_SEVERAL_HOSTS: dict[str, Ranks] = {
    "look at a rank that is left, too": [lost(), asked(1, -9, is_left=True)],
    "look at the other hosts": [lost(), lost(1, 98.7)],
    "an abort may come from another host": [lost(), ended(1, -6, ended_s=99)],
}


def wrapper(pid: int, seconds: float, exitcode: int = 3, **changes: Any) -> EndedRank:
    """Return the end of a wrapper below which a Python, or the wrapper itself (1000), failed at this time."""
    return ended(0, exitcode, error=error("KeyError", pid=pid, time_s=seconds), **changes)


INTERRUPT = error("KeyboardInterrupt", time_s=99)
ENDS: dict[str, EndedRank] = {
    "a wrapper whose Python failed": wrapper(77, 99.0),
    "a wrapper that is itself the Python": wrapper(1000, 9.0),
    "a wrapper that survived its Python": wrapper(77, 9.0),
    "a wrapper whose later program crashed, as shells report it": wrapper(77, 99.0, 128 + signal.SIGSEGV),
    "a wrapper that crashed": wrapper(77, 99.0, -signal.SIGSEGV),
    "a wrapper that was ended": wrapper(77, 99.0, was_ended=True),
    "a Python that was ended": wrapper(1000, 99.0, was_ended=True),
    "interrupted by Ctrl-C while it was ended": asked(0, 1, error=INTERRUPT),
    "ended by SIGINT": asked(0, -2, error=INTERRUPT),
    "a shell ended by SIGINT": asked(0, 130, error=INTERRUPT),
    "ended by SIGHUP": asked(0, -1),
    "nothing recorded": ended(1),
    "recorded by torch": ended(1, error=record_at(9)),
    "recorded as text": ended(1, error={"message": "just text", "timestamp": 5}),
    "recorded without a stack": ended(1, error={"message": {"message": "no stack", "extraInfo": {}}}),
    "recorded by another program": ended(1, error=["not", "torch's"]),
    "recorded with other types": ended(1, error={"message": {"extraInfo": 7}, "timestamp": "soon"}),
    "recorded with more other types": ended(1, error=error(7, ["x"], timestamp={})),  # type: ignore[arg-type]
    "a real-time signal": ended(0, -40),
    "a program below it was killed": ended(0, 137),
    "an exit status that is no signal's": ended(0, 255),
    "finished": ended(0, 0),
    "finished while it was ended": asked(0, 0),
    "ended by SIGTERM": asked(0, -15),
    "ended by SIGKILL": asked(0, -9),
    "a shell ended by SIGTERM": asked(0, 143),
    "ended by the signal that asks for its stack": asked(0, 1 - signal.SIGRTMAX),
    "crashed while it was ended": asked(0, -11),
    "failed while it was ended": asked(0, 3),
    "still there": asked(0, -9, is_left=True),
    "raised while it was ended": asked(0, 1, error=at(9)),
}

BEGIN = "Traceback (most recent call last):\n"
READS_TENSOR = '  File "torch/multiprocessing/reductions.py", line 538, in rebuild_storage_fd\n'
READS_BATCH = f'  File "torch/utils/data/dataloader.py", line 1291, in _try_get_data\n{READS_TENSOR}'
FULL: dict[str, Any] = {"shm_bytes": 64 << 20, "shm_used": 0.95}
MEMORY: dict[str, Any] = {"out_of_memory": "out of memory", "out_of_memory_advice": "use less"}
NO_SHM = "RuntimeError: unable to allocate shared memory(shm) for file </torch_48_1_0>: No space left on device (28)"
NO_FILE = (
    "RuntimeError: unable to open shared memory object </torch_48_1_0> in read-write mode: Too many open files (24)"
)
EXITED = "RuntimeError: DataLoader worker (pid(s) 1, 2) exited unexpectedly"
WORKER = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: {}. "
CAUSES: tuple[tuple[int | str, dict[str, Any]], ...] = (
    *((-number, {}) for number in (6, 7, 9, 11, 15, 34)),  # abort, bus error, kill, segmentation fault; without a cause
    *((status, {}) for status in (3, 134)),
    *((-9, MEMORY), (-7, {**FULL, "shm_used": 0.97}), (-7, {**FULL, "shm_used": 0.5})),
    *((WORKER.format("Killed"), MEMORY), (WORKER.format("Killed"), {})),
    *((f"{WORKER.format('Bus error')}It is possible that …", {**FULL, "shm_used": used}) for used in (0.95, 0.2)),
    (NO_SHM, {"shm_bytes": 64 << 20}),
    (f"RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal {BEGIN}{NO_SHM}", {}),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", {}),
    ("OSError: [Errno 28] No space left on device: '/data/x'", FULL),
    (NO_FILE, FULL),
    (WORKER.format("Segmentation fault"), {}),
    (WORKER.format("Unheard of"), MEMORY),
    *((EXITED, facts) for facts in ({"out_of_memory": "out of memory"}, {}, FULL)),
    *((f"{BEGIN}{READS_BATCH}EOFError", facts) for facts in (FULL, {})),
    (f"{BEGIN}{READS_BATCH}ConnectionResetError: x", MEMORY),
    (f"{BEGIN}{READS_BATCH}KeyError: x", MEMORY),
    (f"{BEGIN}{READS_TENSOR}EOFError: of another queue of tensors", MEMORY),
    ("EOFError: of the script's own", MEMORY),
    ("RuntimeError: DataLoader worker (pid 1) exited unexpectedly with exit code 3.", {}),
    (f"{BEGIN}{WORKER.format('Killed')}\n\n…\n\n{EXITED}", {}),
    (f"{BEGIN}{EXITED} with exit code 3.\n\n…\n\n{EXITED}", {}),
    ("ValueError: Killed", MEMORY),
)


def with_cause(end: int | str) -> EndedRank:
    """Return a rank that ended with this status or signal, or with this exception or traceback."""
    if isinstance(end, int):
        return ended(0, end)
    return ended(0, error=error(end.rpartition("\n")[2] if end.startswith(BEGIN) else end, end))


def recorded(raised: BaseException) -> EndedRank:
    message = "".join(traceback.format_exception_only(raised)).strip()
    return ended(0, error=error(message, "".join(traceback.format_exception(raised)), time_s=99.0))


def raised(error: Raised, cause: BaseException | None = None) -> Raised:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


class OwnError(Exception):
    """An exception whose name has a module in a traceback."""


def of_worker(error: BaseException) -> BaseException:
    """Return the exception that torch's ExceptionWrapper makes of an exception of a worker."""
    stack = "".join(traceback.format_exception(raised(error, raised(OSError("cause"), KeyError("root")))))
    return raised(type(error)(f"Caught {type(error).__name__} in DataLoader worker process 3.\nOriginal {stack}"))


def after(handled: BaseException) -> BaseException:
    """Return an exception of the program's own that was raised while it handled another."""
    try:
        try:
            raise handled
        except type(handled):
            raise KeyError("own")  # noqa: B904 - this is what is tested
    except KeyError as caught:
        return caught


GROUP = ExceptionGroup("g", [ExceptionGroup("h", [OSError("y")]), ValueError("x")])
RAISED: dict[str, BaseException] = {
    "of a worker": of_worker(ValueError("image 17.jpg is truncated")),
    "of a worker, of several lines": of_worker(ValueError("first\n\nsecond")),
    "of a worker, without a text": of_worker(ValueError("")),
    "of a worker, of a module": of_worker(OwnError("text")),
    "of a worker, with a traceback in its text": of_worker(
        ValueError("a tool said:\nTraceback (most recent call last):\n  File\nKeyError")
    ),
    "after a worker's, which was handled": after(of_worker(ValueError("x"))),
    "alone": raised(ValueError("x")),
    "from a cause": raised(ValueError("x"), OSError("y\nz")),
    "from a group": raised(ValueError("x"), raised(ExceptionGroup("g", [OSError("y")]))),
    "a group with a chain": raised(ExceptionGroup("g", [raised(OSError("y"), KeyError("z")), ValueError("x\ny")])),
    "a group in a group": raised(GROUP, KeyError("z")),
    "a group of many": raised(ExceptionGroup("g", [ValueError(str(number)) for number in range(20)])),
    "from multiprocessing's traceback": raised(
        ValueError("x"), RemoteTraceback('\n"""\nTraceback (most recent call last):\n  File\nKeyError: 3\n"""')
    ),
}

STACK = 'Stack (most recent call first):\n  File "{}", line 7 in {}\n  File "/home/ada/train.py", line 3 in main\n'
STACKS = (
    'Stack (most recent call first):\n  File "/home/ada/tr',
    STACK.format("/home/ada/data.py", "read"),
    STACK.format("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "barrier"),
    STACK.format("/usr/lib/python3.12/threading.py", "wait"),
    STACK.format("<frozen importlib._bootstrap>", "_load"),
    '  File "/usr/lib64/python3.13t/a.py", line 7 in wait\n',
    '  File "/home/ada/train.py", line 7 in <module>\n',
)


def account(ranks: Ranks, *, is_only_host: bool = True, **facts: Any) -> str:
    """Return the account of these ranks in lines: the first to fail comes first."""
    order, why_first = in_order(ranks, is_only_host=is_only_host)
    failure = JobFailure(
        program="train.py", host="node7", ranks=order, why_first=why_first, is_only_host=is_only_host, **facts
    )
    found = failure.to_json()
    assert (failure.first, bool(found["why_first"])) == (order[0], bool(why_first))
    lines = [
        f"  rank {rank.rank} {rank.state} at {rank.failed_s:.2f} s: {rank.end}"
        + "".join(
            f", {name} {value!r}"
            for name in ("signal_number", "exception", "raised_in", "raised_from", "was_in", "failed_by_itself")
            if (value := getattr(rank, name))
        )
        + (f", members {members}" if (members := rank.chain[-1].members) else "")
        for rank in order
    ]
    cause, advice = likely_cause(failure)
    lines += [f"  {name}: {text}" for name, text in (("why", why_first), ("likely", cause), ("do", advice)) if text]
    return "".join(f"{line}\n" for line in lines)


def test_accounts_are_the_recorded_ones() -> None:
    """The order of the ranks, their states, exceptions and places, why one is the first, and the likely cause.

    The first failure is the one that happened first, by what the rank recorded or by when its end was seen, unless its
    exception says that it lost another rank. An error file that torch did not write does not break the account.
    """
    text = "".join(f"{title}\n{account(ranks)}" for title, ranks in FIRST.items())
    text += "".join(f"{title}\n{account(ranks, is_only_host=False)}" for title, ranks in OF_SEVERAL_HOSTS.items())
    text += "".join(f"{title}\n{account([rank])}" for title, rank in ENDS.items())
    text += "".join(f"{end!r} {[*facts]}\n{account([with_cause(end)], **facts)}" for end, facts in CAUSES)
    text += "".join(f"raised {title}\n{account([recorded(error)])}" for title, error in RAISED.items())
    text += "".join(f"{stack!r}\n{account([asked(0, -15, stack=stack)])}" for stack in STACKS)
    compare(text, str(Path(__file__).with_name("failures.txt")))


def test_json_and_pickle() -> None:
    """The report has each rank's facts; unknown ones are null. The errors can be pickled."""
    order, why = in_order([asked(0, -15), ended(1, 3), ended(2, error=record_at(200)), ended(3, 0)], is_only_host=True)
    found = JobFailure(program="train.py", host="node7", ranks=order, why_first=why)
    written: Any = found.to_json()
    assert (written["first"], written["cause"], written["time_s"]) == (1, None, 100.0)
    assert [rank["exit_status"] for rank in written["ranks"]] == [3, 1, None, 0]
    assert [rank["signal"] for rank in written["ranks"]] == [None, None, "SIGTERM", None]
    assert [rank["exception"] for rank in written["ranks"]] == [None, "KeyError: 'x'", None, None]
    again = pickle.loads(pickle.dumps(RanksFailed(found)))  # noqa: S301 - ours
    assert (again.message, again.failure) == ("train.py: rank 1 failed first: exit status 3", found)
    for notes, said in (((), "no rank is running"), (("rank 0: still there",), "rank 0: still there")):
        stop = pickle.loads(pickle.dumps(Stopped(signal.SIGTERM, *notes)))  # noqa: S301 - ours
        assert (stop.message, stop.exit_code) == (f"stopped by SIGTERM; {said}", 143)
