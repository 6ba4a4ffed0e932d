"""Stage 4: the shim that each rank starts as.

It ties this process to its launcher's life, binds it, records the kernel's report, and execs the user's command.

It is started with `python -I -S`, without site-packages, so that it takes milliseconds. This module and its imports use
the standard library only, without json and without modules that import typing, enum, dataclasses, re, collections,
functools or contextlib. Only a rank with a refusal that the rehearsal did not have loads the plan's classes.
"""

from __future__ import annotations

import os
import sys

from numapin.base.stderr import say
from numapin.errors import NumapinError
from numapin.rank import bind, handover
from numapin.rank.become import SIGKILL, accept, become
from numapin.rank.hook_env import HOOK, with_hook
from numapin.system import calls, proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_PACKAGE_PARENT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FIND_NUMAPIN: Final = f"import sys; sys.path.append({_PACKAGE_PARENT!r})"
"""Python code. It appends, so that no file beside this package can replace a standard module."""
CODE: Final = f"import gc; gc.disable(); {FIND_NUMAPIN}; from numapin.rank.shim import main; main()"
"""The code that `python -I -S -c` runs as the shim."""


def main() -> None:
    """Bind, record, and become the user's command; never return.

    LOCAL_RANK is not used, because --virtual-local-rank makes it 0 in every rank. As a shell does, exits with status
    127 if the command does not exist, and 126 if it cannot be executed.
    """
    local_rank = sys.argv[1].removeprefix("--local-rank=")
    launcher = int(sys.argv[2].removeprefix("--launcher="))
    program, rest = sys.argv[3].removeprefix("--exec="), sys.argv[4:]

    # The kernel kills this process, and the program that it becomes, when the launcher ends: by SIGKILL, because a
    # launcher that is able to stop its ranks in another way has done so.
    calls.end_with_parent(SIGKILL)
    parent = os.getppid()
    if parent != launcher:  # it ended earlier
        say(
            f"a rank exits: its parent is process {parent} instead of its launcher, process {launcher}: the launcher "
            "has ended, or the Python for ranks is a wrapper script, which must exec Python"
        )
        os._exit(1)

    try:
        own = handover.take_slice(os.environ)
    except NumapinError as error:
        say(f"rank {local_rank} does not start: {error.message}; hint: {error.hint}")
        os._exit(1)
    applied = bind.apply(own)
    binding = own.json
    is_as_planned = all(text in binding for text in applied.shortfalls)  # the plan has what the rehearsal found
    if not is_as_planned:
        import json

        from numapin.plan.model import RankPlan

        rank = RankPlan.from_json(binding, source="the slice of the plan", hint="start the run again")
        for text in bind.surprises(rank, applied.shortfalls):
            say(f"rank {local_rank}: {text}")
        binding = json.dumps(bind.as_bound(rank, applied.shortfalls).to_json())
    _record(local_rank, own.json, applied)

    # The hook (sitecustomize.py) writes what ends Python into torch's error file, and removes the two variables below
    # again; a wrapper that is not Python passes them on to the Python below it. The code (-c) of --run-path and of
    # `numapin.spawn`, which may put other flags before -u, writes that file itself.
    is_own_code = program and (rest[0] != "-u" or rest[1].startswith("-c"))
    if not is_own_code and os.environ.get("TORCHELASTIC_ERROR_FILE") and os.pathsep not in HOOK:
        os.environ["PYTHONPATH"] = with_hook(os.environ.get("PYTHONPATH", ""))
        os.environ["NUMAPIN_RANK_PID"] = str(os.getpid())
    accept()
    become([program, *rest] if program else rest, binding, own.num_threads, own.nic_variables)


def _record(local_rank: str, planned: str, applied: bind.Applied) -> None:
    """Write the request and its result into the run directory."""
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    record = {
        "schema": _json("numapin.observed/1"),
        "local_rank": local_rank,
        "rank": _json(int(os.environ["RANK"])),
        "restart": _json(restart),
        "pid": _json(os.getpid()),
        "start": _json(proc.start_time()),
        "host": _json(os.uname().nodename),
        "requested": planned,
        "applied": _json(applied.to_json()),
    }
    text = "{\n" + ",\n".join(f' "{name}": {value}' for name, value in record.items()) + "\n}\n"
    try:
        handover.write_text(os.environ["NUMAPIN_RUN_DIR"], f"observed-{local_rank}-{restart}.json", text)
    except NumapinError as error:  # a full disk is no reason to lose the job
        say(f"rank {local_rank}: no record of the binding: {error.message}")


def _json(value: object) -> str:
    """Return the JSON of a value. Importing json takes 12 ms, and the records of few ranks need it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}": {_json(item)}' for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return f'"{value}"'
    import json

    return json.dumps(value)
