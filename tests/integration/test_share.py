"""`numapin.share` between processes: ranks, the processes they start, failures, and what is left after SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.data.warm import run_script
from tests.integration.forking import CommandLine
from tests.integration.launching import Done, all_ended, call, environment, numapin, script, start, torchrun
from tests.waiting import wait_until

IN_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child")  # with the network and the user of the host
BEGIN = """
import json, math, os, sys, time, pathlib, numapin
def files():
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in maps if "memfd:numapin-share" in line})
def load():
    print("made", flush=True)
    return [(f"{number}.jpg", number) for number in range(5000)]
def wait_for_the_other():
    while True:
        own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and
               os.path.lexists(f"/proc/self/fd/{fd}")}
        rows = [line.split() for line in open("/proc/net/unix") if "numapin-share" in line]
        names = [row[7] for row in rows]
        if any(f"socket:[{row[6]}]" in own and names.count(row[7]) > 1 for row in rows):
            return  # a socket that has connected has our socket's name, too
        time.sleep(0.02)
def show(**found):
    os.write(1, (json.dumps({"rank": os.environ.get("RANK"), **found}) + chr(10)).encode())
"""
SHARE = f"""{BEGIN}
shared = numapin.share(load)
show(last=shared[-1], length=len(shared), files=files())
time.sleep(1) # so that no other file gets the same number
"""
KILLED = f"""{BEGIN}
shared = numapin.share(load)
show(files=files(), pid=os.getpid())
time.sleep(1000)
"""


def ranks(text: str, num_ranks: int, **changes: str) -> list[Any]:
    """Start ranks without a launcher, as one would, rank CONTAINED in a PID namespace; return how each ended."""
    job = {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(os.getpid()), "NUMAPIN_RUN_DIR": ""}
    started, pipe = [], subprocess.PIPE
    for rank in map(str, range(num_ranks)):
        line = [*(IN_CONTAINER if changes.get("CONTAINED") == rank else ()), sys.executable, "-c", text]
        environ = environment(**job, **{"LOCAL_RANK": rank, "RANK": rank, **changes})
        started.append(subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environ))
    return all_ended(*started)


def found_by(outputs: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in outputs.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: str(line["rank"]))


def check_shared(outputs: str, num_ranks: int) -> None:
    found = found_by(outputs)
    assert outputs.count("made\n") == 1
    assert [rank["rank"] for rank in found] == [str(rank) for rank in range(num_ranks)]
    assert [(rank["last"], rank["length"]) for rank in found] == [(["4999.jpg", 4999], 5000)] * num_ranks
    assert len({*map(str, (rank["files"] for rank in found))}) == 1
    assert len(found[0]["files"]) == 1


@pytest.mark.parametrize("launcher", [partial(numapin, "run", "--quiet"), torchrun], ids=["numapin", "torchrun"])
def test_ranks_of_a_launcher_share_one_file(tmp_path: Path, launcher: Callable[..., Done]) -> None:
    """Under numapin run and torchrun, the first rank makes the data, and all ranks map the same file."""
    done = launcher("--nproc-per-node", "3", script(tmp_path, SHARE))
    assert done.status == 0, done.err
    check_shared(done.out, 3)


def test_ranks_that_all_see_local_rank_0_share_one_file() -> None:
    """With torchrun's --virtual-local-rank, RANK tells which rank is the first of its host.

    On torchrun's second host it is the one with LOCAL_RANK=0, whatever its RANK is: here 1 of 3.
    """
    group = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = ranks(SHARE, 2, LOCAL_RANK="0", WORLD_SIZE="2", **group)
    assert [rank.status for rank in done] == [0, 0], done
    check_shared("".join(rank.out for rank in done), 2)
    shift = "os.environ['RANK'] = str(1 + int(os.environ['LOCAL_RANK']))"
    text = SHARE.replace("shared =", f"{shift}\nshared =").replace("share(load)", "share(load, timeout_s=200)")
    done = ranks(text, 2, WORLD_SIZE="3", **group | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"})
    assert [rank.status for rank in done] == [0, 0], done


def test_ranks_of_different_jobs_do_not_meet() -> None:
    """Ranks with different values of a job's variable wait for others, instead of taking each other's data."""
    text = f"""{BEGIN}
for variable in ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PBS_JOBID"):
    numapin.share([0], name="both are here")
    os.environ[variable] = os.environ["RANK"]
    try:
        numapin.share([1], timeout_s=2)
    except numapin.NumapinError as error:
        print(error.message)
    del os.environ[variable]
"""
    for done in ranks(text, 2):
        assert done.out.count("did not call numapin.share within 2 s") == 3, done


def test_calls_are_matched_by_number_and_name() -> None:
    """The second call of each rank gets the second data; calls with names may come in any order, and again."""
    text = f"""{BEGIN}
first, second = (numapin.share(lambda: [number]) for number in (1, 2))
named = [numapin.share([number], name=name, timeout_s=math.inf)[0] for number, name in enumerate("abbbbb")]
show(found=[first[0], second[0], *named])
"""
    done = ranks(text, 2)
    assert [rank["found"] for one in done for rank in found_by(one.out)] == [[1, 2, *range(6)]] * 2, done


PER_NODE = f"""{BEGIN}
import numapin.sharing.call as call
call.usable_nodes = lambda: call.CpuSet({{0, 1000}})
call._own_node = lambda nodes: 1000 * (os.environ["RANK"] == "1")
shared = numapin.share(load, placement="per-node")
show(last=shared[-1], files=files())
time.sleep(1) # so that no other file gets the same number
"""


def test_each_node_has_a_copy() -> None:
    """Ranks of one node share its copy. The kernel refuses a node here; the warning names it, at the user's line."""
    done = ranks(PER_NODE, 3)
    found = [found_by(one.out)[0] for one in done]
    assert [rank["last"] for rank in found] == [["4999.jpg", 4999]] * 3
    assert found[0]["files"] == found[2]["files"] != found[1]["files"]
    (warning,) = [line for line in done[0].err.splitlines() if "RuntimeWarning" in line]
    assert warning.startswith("<string>:")
    assert "pages cannot be placed on nodes 1000" in warning
    assert [done[1].err, done[2].err] == ["", ""]


RANK = "int(os.environ['RANK'])"
DIFFERENT = [
    (f"numapin.share([0] * (3 + {RANK}))", "a list of length 3", "a list of length 4"),
    (f"numapin.share([(0,), [0]][{RANK}])", "a tuple of length 1", "a list of length 1"),
    (f"numapin.share([0], placement=['interleave', 'per-node'][{RANK}])", "='interleave'", "='per-node'"),
]


def test_different_data_is_an_error_in_all_ranks() -> None:
    """If the ranks pass data of different types or lengths, or other placements, each of them names both."""
    tries = [f"try: {call}\nexcept numapin.UsageError as error: print(error.message)" for call, *_ in DIFFERENT]
    for done in ranks("\n".join([BEGIN, *tries]), 2):
        messages = done.out.splitlines()
        assert len(messages) == len(DIFFERENT), done.err
        for message, (_call, first, second) in zip(messages, DIFFERENT, strict=True):
            assert first in message
            assert second in message


def test_a_failure_of_the_first_rank_reaches_all() -> None:
    """If the first rank cannot make the data, it raises its own error, and the others one that quotes it."""
    text = f"{BEGIN}\nnumapin.share(lambda: wait_for_the_other() or {{}}['missing'])"
    first, second = ranks(text, 2)
    assert first.err.endswith("KeyError: 'missing'\n")
    assert "NumapinError: local rank 0 did not share its data: KeyError: 'missing'" in second.err


FORK_AND_DIE = f"""{BEGIN}
def fork():
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(200)
        os._exit(0)
def load():
    fork()
    wait_for_the_other()
    os.kill(os.getpid(), 9)
def die_while_it_waits():
    wait_for_the_other()
    time.sleep(1)  # until the other one's request has been read
    fork()
    os.kill(os.getpid(), 9)
"""
IN_THREAD = """
import threading
os.environ["LOCAL_WORLD_SIZE"] = "3"  # of which one does not come
if os.environ["RANK"] == "0":
    threading.Thread(target=die_while_it_waits).start()
numapin.share([1], timeout_s=1000)
"""


@pytest.mark.parametrize("call", ["numapin.share(load, timeout_s=1000)", IN_THREAD], ids=["makes data", "waits"])
def test_a_process_that_the_first_rank_forked_does_not_hide_its_death(call: str) -> None:
    """If the first rank is killed, the others raise an error although a process that it forked still runs."""
    text = f"{FORK_AND_DIE}{call}"
    first, second = ranks(text, 2)
    assert first.status == -signal.SIGKILL
    assert "the first rank of this host ended before it had shared the data" in second.err


def test_another_program_at_the_socket_is_ignored() -> None:
    """A connection that sends something else does not disturb the ranks."""
    text = f"""{BEGIN}
import contextlib, socket
def disturb():
    for fd in range(3, 50):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as own:
            address = own.getsockname()
            if isinstance(address, bytes): # the name of a socket without a file
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                    connection.connect(address)
                    connection.send(b"?")
                return [1]
if os.environ["RANK"] == "1":
    time.sleep(2)
numapin.share(disturb, timeout_s=200)
"""
    assert [rank.status for rank in ranks(text, 2)] == [0, 0]


@pytest.mark.parametrize("contained", [0, 1])
def test_another_container_gets_no_data(tmp_path: Path, contained: int) -> None:
    """A process in another PID namespace is refused by either side, although it has the same user and network."""
    if call(*IN_CONTAINER, "true").status:
        pytest.skip("no right to make a PID namespace here (unshare --pid)")
    text = f"""{BEGIN}
ready = pathlib.Path({str(tmp_path)!r})
(ready / os.environ["RANK"]).touch()
while len(list(ready.iterdir())) < 2:
    time.sleep(0.02)
show(found=numapin.share([1], timeout_s=10)[0])
"""
    done = ranks(text, 2, CONTAINED=str(contained))
    assert [rank.status for rank in done] == [1, 1], done
    assert "local rank 1 did not call numapin.share within 10 s" in done[0].err
    problem = {0: "ended before it had shared the data", 1: "belongs to another user or container"}[contained]
    assert problem in done[1].err


@pytest.mark.parametrize(("absent", "problem"), [(0, "the first rank of this host"), (1, "local rank 1")])
def test_a_rank_that_does_not_call_is_named(absent: int, problem: str) -> None:
    """After the time limit, the ranks that wait name the one that did not call it."""
    text = f"{BEGIN}\nif os.environ['RANK'] != '{absent}': numapin.share([1], timeout_s=0.5)"
    done = ranks(text, 2)
    assert done[absent].status == 0
    assert f"{problem} did not call numapin.share within 0.5 s" in done[1 - absent].err


def test_nothing_is_left_after_sigkill(tmp_path: Path) -> None:
    """Once the launcher and all ranks are killed, no process maps the file; neither file nor socket had a name."""
    line = ["run", "--quiet", "--nproc-per-node", "2", script(tmp_path, KILLED)]
    environ, out = environment(TMPDIR=str(tmp_path)), tmp_path / "out"
    command = CommandLine(module="numapin", arguments=line, environ=environ, cwd=str(tmp_path))
    process = start(command, out=out, err=tmp_path / "err", fork=True)
    try:
        assert wait_until(lambda: len(found_by(out.read_text())) == 2, limit_s=100)
        found = found_by(out.read_text())
        assert mapped(found[0]["files"][0])
        before = sockets()  # of other jobs, too, which end
    finally:
        process.kill()
        process.wait()
    for rank in found:
        with suppress(ProcessLookupError):  # it may have ended with the launcher
            os.kill(rank["pid"], signal.SIGKILL)
    assert wait_until(lambda: not mapped(found[0]["files"][0]), limit_s=60)
    assert wait_until(lambda: not before & sockets(), limit_s=100)
    name = "*numapin-share*"
    assert [*tmp_path.rglob(name), *Path("/dev/shm").glob(name)] == []  # noqa: S108 - other tests' folders come and go


def sockets() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "numapin-share" in line}


def mapped(number: str) -> bool:

    def maps_it(path: Path) -> bool:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            return False
        return any("memfd:numapin-share" in line and line.split()[4] == number for line in lines)

    return any(map(maps_it, Path("/proc").glob("[0-9]*/maps")))


PROCESSES = f"""{BEGIN}
import multiprocessing, numpy
def read(shared, array, answers):
    where = array.__array_interface__["data"][0]
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in open("/proc/self/maps")
              if "memfd:numapin-share" in line]
    is_inside = any(start <= where < end for start, end in ranges)
    answers.put((list(shared) == load(), array.tolist(), is_inside, files()))
if __name__ == "__main__":
    data = numapin.share({{"samples": load(), "numbers": numpy.arange(100_000)}})
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        process = context.Process(target=read, args=(data["samples"], data["numbers"][7:20:2], answers))
        process.start()
        show(method=method, found=answers.get(), files=files())
        process.join()
"""


def test_processes_of_every_kind_map_the_same_file(tmp_path: Path) -> None:
    """Forked processes, and those that get their arguments pickled, map the file; an array's slice is not copied."""
    done = call(sys.executable, script(tmp_path, PROCESSES))
    assert done.status == 0, done.err
    found = found_by(done.out)
    assert [each["method"] for each in found] == ["fork", "spawn", "forkserver"]
    for each in found:
        assert each["found"] == [True, list(range(7, 20, 2)), True, each["files"]]


LOADERS = f"""{BEGIN}
import torch
class Rows(torch.utils.data.Dataset):
    def __init__(self, samples, rows):
        self.samples, self.rows = samples, rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        inside = any(
            int(line.split("-")[0], 16) <= self.rows.data_ptr() < int(line.split()[0].split("-")[1], 16)
            for line in open("/proc/self/maps") if "memfd:numapin-share" in line
        )
        return self.rows[index] + self.samples[index][1], inside
if __name__ == "__main__":
    rows = numapin.share(torch.arange(800).view(8, 100))
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["numpy", "torch.utils.data", "numapin"])
    for kind in (numapin.DataLoader, torch.utils.data.DataLoader):
        loader = kind(Rows(numapin.share(load), rows[:, 3]), batch_size=4, num_workers=1,
                      multiprocessing_context="forkserver")
        values, inside = zip(*loader)
        show(values=torch.cat(values).tolist(), inside=torch.cat(inside).tolist())
"""


def test_workers_that_are_not_forked_read_the_same_tensor(tmp_path: Path) -> None:
    """Workers of torch's DataLoader and of ours get a slice of a shared tensor by reference."""
    done = call(sys.executable, script(tmp_path, LOADERS))
    assert done.status == 0, done.err
    found = found_by(done.out)
    assert [each["values"] for each in found] == [[101 * index + 3 for index in range(8)]] * 2
    assert [each["inside"] for each in found] == [[True] * 8] * 2


COLLATED = f"""{BEGIN}
import numpy, torch, warnings
warnings.simplefilter("error", UserWarning)
rows = numapin.share(lambda: [numpy.arange(3) + number for number in range(4)])
for size in (None, 2):
    show(rows=[batch.tolist() for batch in torch.utils.data.DataLoader(rows, batch_size=size)])
"""
OWN = f"""{BEGIN}
import numpy, torch, warnings
warnings.simplefilter("error", UserWarning)
numapin.share(lambda: [numpy.arange(3)])[0]
torch.as_tensor(numpy.frombuffer(b"the user", dtype="uint8"))
"""


def test_torch_collates_shared_arrays_without_a_warning(tmp_path: Path) -> None:
    """Its warning of a crash after a write to arrays that are not writable does not concern them, only others."""
    status, out, err = run_script(tmp_path, COLLATED)
    rows = [[number, number + 1, number + 2] for number in range(4)]
    assert (status, [each["rows"] for each in found_by(out)]) == (0, [rows, [rows[:2], rows[2:]]]), err
    status, _, err = run_script(tmp_path, OWN)  # torch warns once a process
    assert (status, "not writable" in err) == (1, True), err
