"""The port on which the ranks of `numapin.spawn` meet: no other user can take it, from its choice to its use."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import numapin
from tests.integration import calls
from tests.integration.seam import hosts, listen, results_of, spawn_call
from tests.needs import needs_root

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOBODY = 65534
_LOOPBACK = ("tcp", "0100007F")

# Tries every address and option that could share the port, until its stdin ends; then prints what it got.
_ATTACK = """
import json, os, select, socket, sys, time
os.setgroups([])
os.setuid(int(sys.argv[2]))
PLACES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"),
          (socket.AF_INET6, "::"), (socket.AF_INET6, "::ffff:127.0.0.1")]
OPTIONS = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
rounds, won = 0, []
while not won and (rounds < 2 or not select.select([0], [], [], 0)[0]):
    for family, address in PLACES:
        for options in OPTIONS:
            with socket.socket(family) as attempt:
                for option in options:
                    attempt.setsockopt(socket.SOL_SOCKET, option, 1)
                if family == socket.AF_INET6:
                    attempt.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                try:
                    attempt.bind((address, int(sys.argv[1])))
                    attempt.listen()
                except OSError:
                    continue
                won.append([address, options])
    rounds += 1
    time.sleep(0.002)  # the ranks need the CPU, too
    if rounds == 1:
        print("began", flush=True)
print(json.dumps({"uid": os.getuid(), "won": won}), flush=True)
"""


@contextmanager
def _attacked(port: int) -> Iterator[list[dict[str, Any]]]:
    """Attack a port as another user during the block; the list has the attacker's report afterwards."""
    reports: list[dict[str, Any]] = []
    command = [sys.executable, "-I", "-S", "-c", _ATTACK, str(port), str(_NOBODY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == b"began\n"
        yield reports
        attacker.stdin.close()
        reports.append(json.loads(attacker.stdout.read()))  # not communicate(): the report may be in the buffer already


@pytest.fixture(params=["numapin", "torch"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Say which server of the store the caller uses: torch's, as if the installed torch were a newer one, or ours."""
    kind: str = request.param
    if kind == "torch":
        monkeypatch.setattr(spawn_call, "why_not_served", lambda _: "this numapin does not know the store of torch 9")
    return kind


@needs_root
def test_another_user_never_gets_the_port(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker with another uid tries from the choice of the port to the last result, and the ranks still meet.

    What is written for torch.multiprocessing.spawn works, too: rank 0 serves other ports; MASTER_PORT, nobody else.
    """
    attack, reports = ExitStack(), list[list[dict[str, Any]]]()

    def attacked(address: str, port: int) -> socket.socket:
        listening = listen(address, port)
        reports.append(attack.enter_context(_attacked(listening.getsockname()[1])))
        return listening

    def collected(*ranks: Any, **options: Any) -> tuple[Any, ...]:
        with attack:
            return results_of(*ranks, **options)

    monkeypatch.setattr(hosts, "listen", attacked)
    monkeypatch.setattr(spawn_call, "results_of", collected)
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (one, other)]
    results = numapin.spawn(calls.meet, ports, num_ranks=2, timeout=240)
    ((report,),) = reports
    assert (report["uid"], report["won"]) == (_NOBODY, [])
    assert results == (({_LOOPBACK}, [2.0] * 4),) * 2, server


@needs_root
def test_the_attack_has_teeth() -> None:
    """The attack succeeds on a port that is only held, with SO_REUSEADDR, until a server needs it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        with _attacked(held.getsockname()[1]) as reports:
            pass
    assert ["127.0.0.1", [socket.SO_REUSEADDR]] in reports[0]["won"]


@needs_root
def test_the_store_is_closed_to_other_users(capfd: pytest.CaptureFixture[str]) -> None:
    """Another user's connection is closed at once, as in `numapin run`; the hint is what a caller of spawn can do."""
    assert numapin.spawn(calls.knock, (0, _NOBODY)) == (["answered", "closed"],)
    err = capfd.readouterr().err
    assert err.count("hint: give its process group a port of its own") == 1
    assert "numapin run" not in err


def test_the_store_ends_with_the_call(server: str) -> None:
    """Nothing listens on the port afterwards, even if the caller keeps a rank's error, as notebooks do."""
    with pytest.raises(numapin.RankError) as caught:
        numapin.spawn(calls.raise_port)
    assert calls.listeners(int(caught.value.message.rpartition("LookupError: ")[2])) == set(), server
