"""Every option of torchrun, together with others, under torchrun and numapin: what the ranks see, and log files."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from torch.distributed.run import get_args_parser

from tests.integration.launching import numapin, script, torchrun
from tests.integration.seam import TORCHRUN_OPTIONS
from tests.needs import TORCH_VERSION

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "moving-from-torchrun.md"

# {folder}, {port} and {module} are different in each run; {python} is this one.
ALONE: Final = {
    key: words.split()
    for line in Path(__file__).with_name("torchrun-options.txt").read_text().splitlines()
    for key, _, words in [line.partition(": ")]
}
ELSEWHERE: Final = {
    "help": "tests/unit/launcher/test_options.py",
    "print_completion": "starts nothing",
    "numa_binding": "torchrun needs the numactl program for it; tests/unit/cli compares what numapin makes of it",
}
GROUPS: Final[Mapping[int, Sequence[Sequence[str]]]] = {
    0: (
        (),
        (
            *("nnodes", "node_rank", "nproc_per_node", "max_restarts", "monitor_interval", "start_method", "role"),
            *("shutdown_timeout", "log_dir", "redirects", "log_line_prefix_template"),
        ),
        ("standalone", "nproc_per_node", "master_port", "rdzv_id", "virtual_local_rank", "local_ranks_filter", "tee"),
        ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "nproc_per_node", "role", "module"),
        ("master_addr", "master_port", "local_addr", "nproc_per_node", "no_python"),
        (
            *("nproc_per_node", "event_log_handler", "signals_to_handle", "duplicate_stdout_filters", "logs_specs"),
            *("duplicate_stderr_filters", "log_dir", "redirects"),
        ),
    ),
    3: (("nproc_per_node", "max_restarts"), ("run_path",), ("tee", "module")),  # with run_path, ranks import torch
}
"""Options that are given together, by the exit status of the ranks; those that the script follows come last."""
C10D: Final = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")

DIFFERENT = {
    "MASTER_PORT": "a free port",
    "MASTER_ADDR": "127.0.0.1 instead of the host's name",
    "TORCHELASTIC_RUN_ID": "random",
    "TORCHELASTIC_ERROR_FILE": "a temporary folder",
    "OMP_NUM_THREADS": "the rank's thread count instead of 1",
    "NUMAPIN_BINDING": "ours",
    "NUMAPIN_HOSTS": "ours",
    "NUMAPIN_RUN_DIR": "ours",
    **(
        {"TORCHELASTIC_SIGNALS_TO_HANDLE": "new in 2.10; numapin handles them with 2.9, too"}
        if TORCH_VERSION < (2, 10)
        else {}
    ),
}
"""The variables that differ, and how."""

DUMP = """
import os, sys, time
folder, status = sys.argv[1:]
os.write(1, b"to out\\n")  # in one piece: ranks share the pipe
os.write(2, b"to err\\n")
attempt = "." + os.environ["TORCHELASTIC_RESTART_COUNT"]
name = folder + "/" + os.environ["RANK"] + attempt
with open(name + "~", "w") as file:
    file.write("\\0".join(f"{name}={value}" for name, value in sorted(os.environ.items())))
os.rename(name + "~", name)
while status != "0" and sum(name.endswith(attempt) for name in os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)  # the first rank to fail ends the others
sys.exit(int(status))
"""

numbers = count()
Outcome = tuple[int, dict[str, dict[str, str]], list[tuple[object, ...]], str]


def free_port() -> str:
    """Return a port that is free, and that no connection gets: it is below Linux's range of ephemeral ports."""
    while True:
        port = 12_000 + (os.getpid() * 97 + next(numbers)) % 20_000
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)


def outcome(folder: Path, launcher: str, options: Sequence[str], status: int) -> Outcome:
    """Return the exit status, the environment of each rank of each attempt, stdout, the log files, and stderr."""
    place = folder / str(next(numbers))
    for name in ("logs", "ranks"):
        (place / name).mkdir(parents=True)
    path = script(place, DUMP, "dumps.py")
    given = {"folder": place / "logs", "port": free_port(), "module": "dumps", "python": sys.executable}
    words = [word.format(**given) for word in options]
    program = [] if "-m" in options else [path]
    arguments = [*words, *program, str(place / "ranks"), str(status)]
    done = (
        torchrun(*arguments, cwd=place) if launcher == "torchrun" else numapin("run", "--quiet", *arguments, cwd=place)
    )
    found = {
        file.name: dict(entry.partition("=")[::2] for entry in file.read_text().split("\0"))
        for file in (place / "ranks").iterdir()
    }
    files = (place / "logs").rglob("*.log")
    logs = [(path.relative_to(place / "logs").parts[1:], sorted(path.read_text().splitlines())) for path in files]
    return done.status, found, [("stdout", sorted(done.out.splitlines())), *sorted(logs)], done.err


def test_the_table_is_complete() -> None:
    """Each option of the installed torchrun is in a group, or named with the test that has it."""
    options = {action.dest for action in get_args_parser()._actions if action.option_strings}
    assert options <= ALONE.keys() | ELSEWHERE.keys()
    assert {name for groups in GROUPS.values() for group in groups for name in group} == ALONE.keys()


def test_the_differences_are_documented() -> None:
    """Each variable that a rank may find changed is on the page for those who come from torchrun."""
    assert [name for name in DIFFERENT if f"| {name} |" not in PAGE.read_text()] == []


def test_exit_status_and_environment(tmp_path: Path) -> None:
    """Each line has torchrun's status, gives its ranks torchrun's variables, and puts their output where it does.

    What each option, alone and in pairs, means to both parsers: tests/unit/launcher/test_options.py.
    """
    known = {option.key for option in TORCHRUN_OPTIONS if option.since <= TORCH_VERSION}
    groups = [(group, status) for status, groups in GROUPS.items() for group in groups]
    lines = [([word for name in group if name in known for word in ALONE[name]], status) for group, status in groups]
    lines.append(([*C10D, *(word for name in ("rdzv_id", "nproc_per_node", "local_addr") for word in ALONE[name])], 0))
    torchrun("--help")  # starts the process that is forked
    with ThreadPoolExecutor(2) as pool:
        started = [
            (
                line,
                status,
                {name: pool.submit(outcome, tmp_path, name, line, status) for name in ("torchrun", "numapin")},
            )
            for line, status in lines
        ]
        wrong = [text for each in started for text in differences(*each)]
    assert not wrong, "\n\n".join(wrong)


def differences(options: Sequence[str], status: int, ended: Mapping[str, Future[Outcome]]) -> Iterator[str]:
    theirs, expected, logs, told = ended["torchrun"].result()
    if (theirs, bool(expected)) != (int(bool(status)), True):
        yield f"torchrun {options}: status {theirs}\n{told}"
        return
    ours, found, own_logs, told = ended["numapin"].result()
    if (ours, found.keys()) != (theirs, expected.keys()):
        yield f"{options}: status {ours} instead of {theirs}, {[*found]} instead of {[*expected]}\n{told}"
        return
    if own_logs != logs or (len(logs) > 1) != ("--log-dir" in options):
        yield f"{options}: output {own_logs} instead of {logs}"
    for rank in expected:
        changed = found[rank].items() ^ expected[rank].items()
        if other := sorted(each for each in changed if each[0] not in DIFFERENT):
            yield f"{options}: rank.attempt {rank}: {other}"
