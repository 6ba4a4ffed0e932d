"""Command lines of the direct way, compared with torch's parser; and those that torch has to read."""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin.cli.run import OPTIONS, make_run_parser
from numapin.launcher import torchrun
from numapin.launcher.direct_options import _NAMES, DirectJob, read_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN = {name: not option.is_flag for option in OPTIONS for name in (*option.opts, *option.secondary_opts)}
SCRIPT = str(Path(__file__).resolve())


def read(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> DirectJob | str:
    """Read a command line."""
    return read_line(arguments, OWN, environ or {}, python=sys.executable)


ALONE = [
    [],
    ["--nproc-per-node", "4"],
    ["--nproc_per_node=gpu"],
    ["--nproc-per-node", "auto"],
    ["--standalone"],
    ["--nnodes", "1"],
    ["--nnodes=1:1"],
    ["--node-rank", "0"],
    ["--node_rank=0"],
    ["--rdzv-backend", "c10d"],
    ["--rdzv_backend=static"],
    ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"],
    ["--rdzv-id", "job7"],
    ["--rdzv-id", "none"],
    ["--max-restarts", "0"],
    ["--max_restarts=0"],
    ["--monitor-interval", "5"],
    ["--monitor_interval=0.5"],
    ["--start-method", "fork"],
    ["--role", "trainer"],
    ["--role="],
    ["--master-addr", "10.0.0.1"],
    ["--master-port", "29501"],
    ["--local-addr", "127.0.0.2"],
    ["--signals-to-handle", "SIGTERM, SIGUSR1"],
    ["--shutdown-timeout", "7"],
    ["--numa-binding", "socket"],
    ["--virtual-local-rank"],
    ["-m"],
    ["--module"],
    ["--no-python"],
    ["--no_python"],
    ["--bind", "exclusive"],
    ["--no-smt", "--memory=bind"],
    ["--quiet", "--strict", "--report", "out.json"],
]
"""Options alone; the test also tries all pairs."""
REST = [
    [],
    ["--lr", "0.1"],
    ["-m", "x", "--", "--bind", "mine", "${local_rank}", "$$", "--nnodes=2"],
    ["--", "a"],
    ["-"],
]


def _program(options: Sequence[str]) -> str:
    if "--no-python" in options or "--no_python" in options:
        return sys.executable
    return "json.tool" if {"-m", "--module"} & set(options) else SCRIPT


def _lines() -> list[list[str]]:
    pairs = [[*one, *other] for one, other in itertools.permutations(ALONE, 2)]
    return [[*options, _program(options), *REST[n % len(REST)]] for n, options in enumerate([*ALONE, *pairs])]


def test_as_torch_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line means what it means to torch's parser: the command of each rank, and every option."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)  # it warns of options without effect
    parser = make_run_parser()
    num_direct = 0
    for line in _lines():
        direct = read(line)
        if isinstance(direct, str):
            assert direct in ("--no-python with -m", "-- after the script", "--rdzv-endpoint"), line
            continue
        num_direct += 1
        job = torchrun.parse(line, parser)
        for name in ("own", "command", "nproc_per_node", "numa_binding", "virtual_local_rank", "signals"):
            assert getattr(direct, name) == getattr(job, name), (name, line)
        assert direct.command_of(3) == job.command_of(3)
        assert job.is_single_host, line
        assert job.min_max_nodes == direct.min_max_nodes == (1, 1)
        arguments = job.arguments
        assert (direct.role, direct.local_addr) == (arguments.role, arguments.local_addr)
        assert direct.run_id == (arguments.rdzv_id if job.has_rendezvous_id else None), line
        assert direct.master_port == (arguments.master_port if job.port_chosen else 0)
        assert direct.shutdown_timeout_s == (30 if job.shutdown_timeout_s is None else job.shutdown_timeout_s)
        assert (direct.program, direct.module, direct.no_python) == (
            arguments.training_script,
            arguments.module,
            arguments.no_python,
        )
        assert arguments.max_restarts == 0
    assert num_direct > 900


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--nnodes 2 s.py", "--nnodes 2"),
        ("--nnodes 1:2 s.py", "--nnodes 1:2"),
        ("--nnodes two s.py", "--nnodes two"),
        ("--max-restarts 3 s.py", "--max-restarts 3"),
        ("--max-restarts=-1 s.py", "--max-restarts -1"),
        ("--node-rank 1 s.py", "--node-rank 1"),
        ("--rdzv-backend etcd-v2 s.py", "--rdzv-backend etcd-v2"),
        ("--rdzv-endpoint head:1 s.py", "--rdzv-endpoint"),
        ("--rdzv-conf a=b s.py", "--rdzv-conf"),
        ("--nproc-per-node cpu s.py", "--nproc-per-node cpu"),
        ("--nproc-per-node many s.py", "--nproc-per-node many"),
        ("--nproc-p 2 s.py", "--nproc-p"),
        ("--nproc-per_node 2 s.py", "--nproc-per_node"),
        ("--redirects 3 s.py", "--redirects"),
        ("-r 3 s.py", "-r"),
        ("-t3 s.py", "-t3"),
        ("--tee 3 s.py", "--tee"),
        ("--log-dir logs s.py", "--log-dir"),
        ("--logs-specs x s.py", "--logs-specs"),
        ("--local-ranks-filter 0 s.py", "--local-ranks-filter"),
        ("--event-log-handler x s.py", "--event-log-handler"),
        ("--run-path s.py", "--run-path"),
        ("--master-port 99999 s.py", "--master-port 99999"),
        ("--signals-to-handle SIGNONE s.py", "--signals-to-handle SIGNONE"),
        ("--shutdown-timeout=-1 s.py", "--shutdown-timeout -1"),
        ("--numa-binding nodes s.py", "--numa-binding nodes"),
        ("--start-method thread s.py", "--start-method thread"),
        ("--no-python -m x", "--no-python with -m"),
        ("--standalone=1 s.py", "--standalone=1"),
        ("--quiet=1 s.py", "--quiet=1"),
        ("--role -x s.py", "--role without a value"),
        ("--role", "--role without a value"),
        ("-- s.py", "--"),
        ("-h", "-h"),
        ("--help", "--help"),
        ("s.py -- a", "-- after the script"),
        ("--quiet", "no script"),
        ("", "no script"),
    ],
)
def test_torch_has_to_read_it(line: str, why: str) -> None:
    """Anything else is torch's, with what made it so."""
    assert read(line.split()) == why


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("PET_NNODES", "1", "the variable PET_NNODES is set"),
        ("TORCHELASTIC_ERROR_FILE", "e.json", "the variable TORCHELASTIC_ERROR_FILE is set"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon"),
    ],
)
def test_variables_of_torch(variable: str, value: str, why: str) -> None:
    """Variables that torch's parser or agent reads are left to them."""
    assert read(["s.py"], {variable: value}) == why


def test_the_grace_period_from_the_environment() -> None:
    """The variable of torch counts, and the option before it."""
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}
    for line, seconds in ((["s.py"], 9), (["--shutdown-timeout", "7", "s.py"], 7)):
        job = read(line, environ)
        assert isinstance(job, DirectJob)
        assert job.shutdown_timeout_s == seconds


def test_the_spellings_are_torchs() -> None:
    """Each name in the table is one of torch's, and none of ours."""
    names = {name for action in make_run_parser()._actions for name in action.option_strings}
    assert set(_NAMES) <= names
    assert not set(_NAMES) & set(OWN)
