"""`numapin trace` with unmodified scripts, on the CPU, through the real command."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from numapin.errors import UsageError
from tests.integration.launching import TORCH_QUICKLY, WITHOUT_COMPILER, numapin, script
from tests.integration.seam import numapin as commands
from tests.integration.seam import read_trace
from tests.integration.warm_ranks import forked_script
from tests.trace.made import loop, record

pytestmark = pytest.mark.xdist_group("warm ranks")  # one process has torch imported

TRACE = ("trace", "--nproc-per-node", "1", "--quiet")
TRAIN = (
    TORCH_QUICKLY
    + """
import sys, time, torch
from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 48
    def __getitem__(self, i): time.sleep({sleep}); return torch.ones(8)
if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in DataLoader(Data(), batch_size=4, num_workers={workers}):
        optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
    print("trained")
"""
)
STEPS = (
    WITHOUT_COMPILER
    + """
import os, sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def steps(num):
    for _ in range(num):
        model(torch.ones(2, 4)).sum().backward(); optimizer.step()
"""
)


def refused(*words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        commands.main(["trace", *words], standalone_mode=False)
    return caught.value


def report(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


class TestTracing:
    """A script that is being traced."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_loop_that_waits(self, tmp_path: Path, workers: int) -> None:
        """The requested number of steps is traced, and the report says that the script waits for data, and how.

        Loads of workers share the clock of the trace: each traced batch was loaded before it was received. A script
        that turns warnings into errors is traced, too, and warnings of the profiler do not stop it.
        """
        text = TRAIN.format(sleep=0.1, workers=workers)
        strict = f"import warnings; warnings.simplefilter('error')\n{text}"
        path = script(tmp_path, text) if workers else forked_script(tmp_path, strict)
        done = numapin(*TRACE, "--steps", "4", "--skip", "3", "--output", "out", path, cwd=tmp_path)
        assert done.status == 0, done.err
        assert "trained\n" in done.out
        assert "waiting for data" in done.out
        (rank,) = report(tmp_path / "out")["ranks"]
        assert (rank["num_steps"], rank["num_batches"], rank["step_unit"]) == (4, 4, "optimizer step")
        assert rank["parts"]["wait"]["share"] > 0.5
        finding, *_ = report(tmp_path / "out")["findings"]  # on a busy machine steps are uneven, too
        assert finding["what"] == "waiting for data"
        assert ("num_workers=N" in finding["remedy"]) == (workers == 0)
        assert not (tmp_path / "out" / ".loads").exists()
        content = json.loads((tmp_path / "out" / "rank-0.trace.json").read_text())
        loads = content["numapin"]["loads"]
        if workers:
            assert len({pid for pid, _, _ in loads}) == workers
            self._assert_loaded_before_received(content, loads)

    @staticmethod
    def _assert_loaded_before_received(content: Any, loads: list[list[int]]) -> None:
        waits = [event for event in content["traceEvents"] if event["name"].startswith("enumerate(DataLoader)")]
        base_ns = content["baseTimeNanoseconds"]
        ended = sorted((end - base_ns) / 1000 for _, _, end in loads)
        got = [wait["ts"] + wait["dur"] for wait in waits]
        assert all(made < at for made, at in zip(ended[3:], got, strict=False))
        assert all(end - start > 0.15e9 for _, start, end in loads)
        shown = [event for event in content["traceEvents"] if event.get("cat") == "numapin"]
        assert {(event["name"], event["pid"]) for event in shown} == {("load", pid) for pid, _, _ in loads}
        assert all(event["ts"] + event["dur"] > waits[0]["ts"] - 1e6 for event in shown)

    def test_inference_by_batches(self, tmp_path: Path) -> None:
        """Without an optimizer a step is a batch; numapin's loader is counted like torch's."""
        text = (
            "import numapin, torch\n"
            "if __name__ == '__main__':\n"
            "    for x in numapin.DataLoader(torch.ones(40, 8), batch_size=2, num_workers=1): x.sum()\n"
        )
        done = numapin(*TRACE, "--steps", "5", "--output", "out", forked_script(tmp_path, text), cwd=tmp_path)
        assert done.status == 0, done.err
        (rank,) = report(tmp_path / "out")["ranks"]
        assert (rank["num_steps"], rank["step_unit"], rank["num_batches"]) == (5, "batch", 5)

    def test_hosts_share_a_folder(self, tmp_path: Path) -> None:
        """Two launchers with one --output, as on a shared file system, use separate folders, and all are read."""
        path = forked_script(tmp_path, TRAIN.format(sleep=0, workers=0))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        meeting = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id two"
        options = (*TRACE, *f"{meeting} --local-addr 127.0.0.1 --steps 2 --skip 1 --output out".split(), path)
        with ThreadPoolExecutor(2) as pool:
            hosts = [future.result() for future in [pool.submit(numapin, *options, cwd=tmp_path) for _ in range(2)]]
        assert [host.status for host in hosts] == [0, 0], [host.err for host in hosts]
        assert len(list((tmp_path / "out").glob("*/report.json"))) == 2
        done = numapin("trace", "--read", "out", "--json", cwd=tmp_path)
        assert sorted(rank["rank"] for rank in json.loads(done.out)["ranks"]) == [0, 1]
        shutil.copytree(next((tmp_path / "out").iterdir()), tmp_path / "out" / "host-of-another-run")
        done = numapin("trace", "--read", "out", "--json", cwd=tmp_path)
        assert (done.status, "2 traces of rank " in done.err) == (2, True)

    def test_a_rank_that_is_restarted(self, tmp_path: Path) -> None:
        """A restarted rank is reported once per start, each with its own loads and name, and can be read again."""
        text = TRAIN.format(sleep=0, workers=1) + "import os\nassert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
        options = ("--max-restarts", "1", "--steps", "2", "--skip", "1", "--output", "out")
        done = numapin(*TRACE, *options, script(tmp_path, text), cwd=tmp_path)
        assert done.status == 0, done.err
        assert "0 (restart 1)" in done.out
        lives = [("rank-0.trace.json", 0), ("rank-0-restart-1.trace.json", 1)]
        assert [(rank["source"], rank["restart"]) for rank in report(tmp_path / "out")["ranks"]] == lives
        for name, _ in lives:
            assert 0 < len(read_trace(json.loads((tmp_path / "out" / name).read_text()), source=name).loads) <= 12
        done = numapin("trace", "--read", "out", "--json", cwd=tmp_path)
        assert [(rank["source"], rank["restart"]) for rank in json.loads(done.out)["ranks"]] == lives

    def test_json_and_two_ranks(self, tmp_path: Path) -> None:
        """With --json stdout has only JSON, for both ranks; the script's own output goes to stderr."""
        path = forked_script(tmp_path, TRAIN.format(sleep=0, workers=0))
        out = ("--steps", "2", "--skip", "2", "--output", "out", "--json")
        done = numapin("trace", "--nproc-per-node", "2", "--quiet", *out, path, cwd=tmp_path)
        assert done.status == 0, done.err
        assert [rank["rank"] for rank in json.loads(done.out)["ranks"]] == [0, 1]
        assert done.err.count("trained") == 2
        assert sorted(name.name for name in (tmp_path / "out").iterdir()) == [
            *("rank-0.json", "rank-0.trace.json", "rank-1.json", "rank-1.trace.json", "report.json")
        ]
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


END = "    print("
PROFILING = "from torch.profiler import profile, schedule\n"
LATER = (
    "with {own} as own:\n"
    "    for _ in range(12): steps(1); own.step()\n"
    "assert own.events()\n"
    "steps(20)\n"
    "print('trained')\n"
)
BATCHES = """
for _ in torch.utils.data.DataLoader(torch.arange(40.), batch_size=2): steps(1)
print('trained', flush=True)
"""
SMALL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
"""
STALLS = """
steps(5)
while not os.path.exists('out/rank-0.trace.json'): time.sleep(0.01)
print('trace there')
"""
FORKS = """
steps(5)
child = os.fork()
steps(10)
if not child: sys.exit(0)
print('child', os.waitpid(child, 0)[1])
"""
RECORD = "print(open('out/rank-0.json').read())\n"
LOOP = TRAIN.format(sleep=0, workers=0)
QUICK = LOOP.replace(END, "    {}; print(")
ITSELF = LOOP.replace(
    "    for x in", "    from torch.profiler import profile\n    own = profile(); own.start()\n    for x in"
)
AFTER = "the script ended after 12 optimizer steps and 12 batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A script in which not all asked steps are traced, and what is seen; None: it is not looked at."""

    text: str
    steps: int = 2
    skip: int = 2
    status: int | None = None
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    num_traced: int | None = None


CASES = {
    "there are fewer steps than asked for, and the unfinished one does not count": Odd(
        text=LOOP, steps=50, skip=3, status=0, out=(f"{AFTER}, 9 steps traced",), num_traced=9
    ),
    "the first traced step is not reached": Odd(
        text=LOOP,
        skip=50,
        status=1,
        out=("trained\n",),
        err=(f"nothing was traced: rank 0: {AFTER}", "hint: give it more steps"),
        num_traced=0,
    ),
    "the only traced step is unfinished": Odd(
        text=STEPS + "steps(3)\n",
        skip=3,
        status=1,
        err=("nothing was traced: rank 0: the script ended after 3 optimizer steps",),
    ),
    "the script fails, with its status and the steps before": Odd(
        text=QUICK.format("raise SystemExit(3)"),
        steps=20,
        status=1,
        out=("the script ended after 12 optimizer steps",),
        err=("  failed  exit status 3\n",),
    ),
    "the process is killed before it can write": Odd(
        text=QUICK.format("import os; os._exit(0)"),
        skip=50,
        status=1,
        err=("rank 0: the process was killed, or is still running",),
    ),
    "the script profiles itself": Odd(text=ITSELF.replace(END, "    own.stop(); print("), err=("is not traced",)),
    "the script profiles itself while ours records, which keeps whole steps": Odd(
        text=f"{STEPS}{PROFILING}steps(5)\n{LATER.format(own='profile()')}",
        steps=30,
        out=("trained\n", "the script profiles itself"),
        num_traced=3,
    ),
    "the script profiles itself while ours gets ready": Odd(
        text=STEPS + PROFILING + LATER.format(own="profile(schedule=schedule(wait=2, warmup=2, active=3))"),
        steps=30,
        skip=3,
        out=("trained\n",),
        err=("the script profiles itself",),
        num_traced=0,
    ),
    "steps stop, and the trace would fill the memory": Odd(
        text=STEPS + STALLS,
        steps=30,
        out=("trace there", "rank 0: no optimizer step for ", " s, 3 steps traced"),  # 2 s or ten usual steps
    ),
    "a later phase has its own optimizer": Odd(
        text=STEPS + f"steps(5)\n{RECORD}optimizer = torch.optim.SGD(model.parameters(), 0.1)\nsteps(30)\n",
        steps=9,
        skip=3,
        status=0,
        out=('"phase":"measuring"',),  # so that --stop waits for the rank
        num_traced=9,
    ),
    "stderr is closed": Odd(text=f"{STEPS}sys.stderr.close(){BATCHES}", out=("trained\n",)),
    "the rank has no number": Odd(text=f"{STEPS}os.environ['RANK'] = ''{BATCHES}", out=("trained\n",)),
    "the rank drops its privileges": Odd(
        text=f"{STEPS}os.chmod('out', 0o700); os.geteuid() or os.setuid(65534){BATCHES}", out=("trained\n",)
    ),
    "a fork ends the trace, and child and parent go on": Odd(
        text=STEPS + FORKS, steps=30, out=("child 0\n", "rank 0: the script forked, 3 steps traced")
    ),
    "the disk is full": Odd(
        text=SMALL + LOOP, status=1, out=("trained\n",), err=("rank 0 is not traced",), num_traced=0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_script(tmp_path: Path, name: str) -> None:
    """Each case has its status, its messages, and no traceback; the rank's record has the number of steps."""
    odd = CASES[name]
    options = ("--steps", str(odd.steps), "--skip", str(odd.skip), "--output", "out")
    done = numapin(*TRACE, *options, forked_script(tmp_path, odd.text), cwd=tmp_path)
    assert odd.status in (None, done.status), done.err
    assert [text for text in odd.out if text not in done.out] == [], done
    assert [text for text in odd.err if text not in done.err] == [], done
    assert "Traceback" not in done.err
    if odd.num_traced is not None:
        record = json.loads((tmp_path / "out" / "rank-0.json").read_text())
        assert record["num_traced"] == odd.num_traced
        assert ("is the disk full?" in record["reason"]) == ("disk" in name)


def test_nothing_to_trace(tmp_path: Path) -> None:
    """Ranks without a step of torch, which may never import it, have their own message; --dry-run starts none."""
    path = script(tmp_path, "print('ran')")
    done = numapin(*TRACE, "--dry-run", "--output", "out", path, cwd=tmp_path)
    assert (done.status, done.out.startswith("rank 0: ")) == (0, True), done.err
    assert not (tmp_path / "out").exists()
    done = numapin(*TRACE, "--output", "out", path, cwd=tmp_path)
    assert (done.status, done.out) == (1, "ran\n")
    assert "no rank took a batch from a torch DataLoader or stepped a torch optimizer" in done.err
    (tmp_path / "rank-0.json").touch()
    (tmp_path / "busy" / ".loads").mkdir(parents=True)
    for words, said in (
        (["--output", str(tmp_path), path], "holds rank-0.json of another run"),
        (["--output", "busy", path], "holds .loads of another run"),  # which has not stepped yet
        (["--output", "new", "--no-python", sys.executable, "-I", path], "-I ignores PYTHONPATH"),
    ):
        done = numapin(*TRACE, *words, cwd=tmp_path)
        assert (done.status, done.out, said in done.err) == (2, "", True), done.err
    done = numapin("trace", "--read")
    assert (done.status, "--read" in done.err) == (2, True), done.err


class TestReading:
    """`numapin trace --read`."""

    def test_a_users_trace_and_a_compressed_one(self, tmp_path: Path) -> None:
        """A user's own traces can be read, also as .gz; --output writes the report, and no trace beside it."""
        content = loop(wait=300, compute=700).content()
        del content["numapin"]
        (tmp_path / "a.json").write_text(json.dumps(content))
        (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
        (tmp_path / "c.json").write_text(json.dumps(content))
        paths = ("--read", "a.json", "b.json.gz", "--read", "c.json")
        done = numapin("trace", *paths, "--output", "out", "--json", cwd=tmp_path)
        assert done.status == 0, done.err
        assert [rank["source"] for rank in json.loads(done.out)["ranks"]] == ["a.json", "b.json.gz", "c.json"]
        assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(done.out)
        assert done.err == "numapin: report: out/report.json\n"

    @pytest.mark.parametrize(
        ("name", "content", "seen"),
        [
            ("a.json", b'{"traceEvents": [{"ph": "X", "ts": 1', "not JSON, or cut off"),
            ("a.json", b"[" * 100_000, "not JSON, or cut off"),
            ("a.json", b"17", "not a Chrome trace"),
            ("a.json", 1 << 30, "too large to read"),
            ("a.json.gz", b"no gzip", "a.json.gz cannot be read"),
            ("a.json.gz", gzip.compress(b"{}" * 500)[:-20], "a.json.gz cannot be read"),
            ("folder/other", b"", "folder has no rank-*.trace.json\n  hint: give a trace file, or the output folder"),
        ],
        ids=["cut off", "deep", "number", "huge", "no gzip", "cut off gzip", "empty folder"],
    )
    def test_broken_files(self, tmp_path: Path, name: str, content: bytes | int, seen: str) -> None:
        """The error names the file and the problem, with a hint."""
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.touch()
            os.truncate(path, content + 1)
        error = refused("--read", str(tmp_path / name.partition("/")[0]))
        assert name.partition("/")[0] in error.message
        assert seen in str(error)
        assert error.hint

    def test_a_broken_rank_in_a_folder(self, tmp_path: Path) -> None:
        """If one rank's trace is broken, the others are reported with a note; if all are, it is an error.

        A record that cannot be read, and why a rank was not traced, are notes, too.
        """
        (tmp_path / "rank-0.trace.json").write_text(json.dumps(loop(compute=5).content()))
        (tmp_path / "rank-0.json").write_text(record(0, reason="it forked", trace="rank-0.trace.json", num_traced=4))
        (tmp_path / "rank-1.trace.json").write_text('{"traceEvents": [')
        (tmp_path / "rank-1.json").write_text("{")
        (tmp_path / "rank-2.json").write_text(record(2, reason="\x1b[2Jgone"))
        (tmp_path / "rank-3.json").mkdir()
        (tmp_path / "rank-4.json").write_text("{}")
        done = numapin("trace", "--json", "--read", str(tmp_path))
        assert done.status == 0, done.err
        content = json.loads(done.out)
        assert [rank["rank"] for rank in content["ranks"]] == [0]
        forked, cut, gone, folder, other, broken = content["notes"][:6]
        assert (forked, gone) == ("rank 0: it forked, 4 steps traced", "rank 2: \N{REPLACEMENT CHARACTER}[2Jgone")
        assert "rank-3.json: " in folder
        assert other.startswith("rank 4: rank-4.json: schema: expected 'numapin.steps/1'")
        assert all(note.startswith("rank 1: ") and "not JSON" in note for note in (cut, broken))
        (tmp_path / "rank-0.trace.json").write_text("17")
        assert "rank 0: rank-0.trace.json: not a Chrome trace" in refused("--read", str(tmp_path)).message

    def test_a_report_that_cannot_be_written(self, tmp_path: Path) -> None:
        """A trace in place of the report is not overwritten; a folder there is an error, and no other file is left."""
        content = json.dumps(loop(compute=5).content())
        (tmp_path / "report.json").write_text(content)
        error = refused("--read", str(tmp_path / "report.json"), "--output", str(tmp_path))
        assert "report.json" in error.message.partition("would overwrite ")[2]
        assert (tmp_path / "report.json").read_text() == content
        (tmp_path / "out" / "report.json" / "full").mkdir(parents=True)
        done = numapin("trace", "--read", "report.json", "--output", "out", cwd=tmp_path)
        assert (done.status, "out/report.json cannot be written" in done.err) == (1, True), done.err
        assert "choose another with --output DIR" in done.err
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.json"]
