"""What a run leaves for its ranks and for other programs: the plan, the command, one record per rank. Edge.

Comes in: the folder of a run (NUMAPIN_RUN_DIR). Goes out: plan.json, command.json and, per rank and restart,
observed-RANK-RESTART.json; and each rank's slice of the plan, in NUMAPIN_SLICE_RANK of the environment that all ranks
inherit. A rank takes its own out, and removes those of the others.

Each rank imports this before its program starts, and not json: a slice is a few words for the rank itself and the JSON
for its program, which the rank need not read. Making and finding the folders is `launcher/run_folder.py`'s work.
"""

from __future__ import annotations

import errno
import os
import sys

from numapin.base.cpu_set import CpuSet
from numapin.base.files import replace_at, unwritten
from numapin.base.folders import open_file, opened, require_own, require_stable
from numapin.base.stderr import say
from numapin.errors import NumapinError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from typing import Final

    from numapin.base.folders import OpenFolder
    from numapin.plan.model import Plan, RankPlan

PLAN: Final = "plan.json"
COMMAND: Final = "command.json"
SLICE_VARIABLE: Final = "NUMAPIN_SLICE_"
"""How the variables with the ranks' slices begin; the number of the local rank follows."""
MAX_FILE_BYTES: Final = 16 << 20
_REMEDY: Final = "name another with NUMAPIN_RUN_DIR=DIR"
_AGAIN: Final = "start the run again"
_MAX_VARIABLE_BYTES: Final = 100_000  # Linux allows 128 KiB
_MAX_ENVIRONMENT_BYTES: Final = 6 << 20  # what Linux allows however large the stack may be


class RankSlice:
    """What a rank needs of its `RankPlan` to bind itself, under the same names; `json` is all of it, for others."""

    __slots__ = ("cpus", "json", "memory", "node", "nodes", "num_threads")

    def __init__(self, text: str) -> None:
        """Read what `_slice` wrote. Raises ValueError and KeyError."""
        words, brace, rest = text.partition("{")
        fields = dict(word.split("=") for word in words.split())
        self.cpus = CpuSet.parse(fields["cpus"])
        self.nodes = CpuSet.parse(fields["nodes"])
        self.memory = fields["memory"]
        self.node = int(fields["node"]) if fields["node"] else None
        self.num_threads = int(fields["num_threads"])
        self.json = brace + rest


def _slice(rank: RankPlan) -> str:
    """Return the text of a slice: `cpus=0-3 nodes=0 memory=bind node=0 num_threads=4 {"local_rank": 0, …}`."""
    from numapin.base.strict_json import encode

    node = "" if rank.node is None else rank.node
    plain = f"cpus={rank.cpus} nodes={rank.nodes} memory={rank.memory} node={node}"
    return f"{plain} num_threads={rank.num_threads} {encode(rank.to_json(), indent=None)}"


def records(folder: str) -> list[str]:
    """Return the paths of what the ranks of a run wrote. Raises OSError."""
    with opened(folder) as descriptor:
        names = os.listdir(descriptor)
    return [os.path.join(folder, name) for name in names if name.startswith("observed-") and name.endswith(".json")]


def write_json(folder: str, name: str, content: object) -> None:
    """Write a JSON file into the folder, whole or not at all. Raises NumapinError that names it."""
    from numapin.base.strict_json import encode

    write_text(folder, name, encode(content) + "\n")


def write_text(folder: str, name: str, text: str) -> None:
    """Write a file into the folder, whole or not at all. Raises NumapinError that names it."""
    try:
        with _opened_to_write(folder) as descriptor:
            require_own(descriptor)
            replace_at(descriptor, name, text, mode=0o600)
    except (OSError, ValueError) as error:
        raise unwritten(os.path.join(folder, name), error, _REMEDY) from None


def hand_over(plan: Plan, run_dir: str, environ: MutableMapping[str, str]) -> None:
    """Put the plan where the ranks and other programs find it: into their environment, and into the run directory.

    Raises NumapinError where ranks would find none; a record that cannot be written besides is a warning.
    """
    from numapin.base.redact import without_secrets

    environ["NUMAPIN_RUN_DIR"] = run_dir
    in_environment = _hand_over_slices(plan, environ)
    try:
        write_json(run_dir, PLAN, plan.to_json())
        write_json(run_dir, COMMAND, {"argv": without_secrets(sys.argv), "pid": os.getpid()})
    except NumapinError as error:
        if not in_environment:
            raise
        say(f"warning: no record of this run: {error.message}")


def _hand_over_slices(plan: Plan, environ: MutableMapping[str, str]) -> bool:
    """Put the slices where ranks find them, those too that are restarted days after somebody cleaned /tmp up.

    That is their environment, while each fits in a variable and all of them in a quarter of what this process may give
    a program. Returns whether they did; else the ranks read plan.json.
    """
    _remove_slices(environ)  # those that this launcher was given, if it is a rank itself
    slices = {f"{SLICE_VARIABLE}{rank.local_rank}": _slice(rank) for rank in plan.ranks}
    sizes = [len(name) + len(text) for name, text in slices.items()]
    limit = min(os.sysconf("SC_ARG_MAX"), _MAX_ENVIRONMENT_BYTES) // 4
    fits = max(sizes, default=0) < _MAX_VARIABLE_BYTES and sum(sizes) < limit
    if fits:
        environ.update(slices)
    return fits


def _remove_slices(environ: MutableMapping[str, str]) -> None:
    for name in [name for name in environ if name.startswith(SLICE_VARIABLE)]:
        del environ[name]


def planned(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the JSON of the run directory's plan, and its path; None if it has none.

    Raises OSError for a file that no run can have written.
    """
    if not environ.get("NUMAPIN_RUN_DIR"):
        return None
    path = os.path.join(environ["NUMAPIN_RUN_DIR"], PLAN)
    try:
        return read_text(path), path
    except (FileNotFoundError, NotADirectoryError):
        return None


def take_slice(local_rank: int, environ: MutableMapping[str, str]) -> RankSlice:
    """Take a rank's slice out of its environment, with those of the others, or read it in the run directory's plan.

    Raises NumapinError where there is none.
    """
    name = f"{SLICE_VARIABLE}{local_rank}"
    text = environ.get(name)
    _remove_slices(environ)
    if text is None:
        text = _planned_slice(local_rank, environ)
    if text is None:
        raise NumapinError(f"{name} is unset, and NUMAPIN_RUN_DIR has no {PLAN}", _AGAIN)
    try:
        return RankSlice(text)
    except (ValueError, KeyError):
        raise NumapinError(f"{name} is not what numapin writes: {text[:60]!r}", _AGAIN) from None


def _planned_slice(local_rank: int, environ: Mapping[str, str]) -> str | None:
    found = planned(environ)
    if found is None:
        return None
    from numapin.plan.model import Plan

    text, path = found
    return _slice(Plan.from_json(text, source=path).ranks[local_rank])


def read_text(path: str) -> str:
    """Return the text of a file in a run directory. Raises OSError, also for one that no run can have written."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        with opened(folder) as descriptor, os.fdopen(open_file(descriptor, name), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        error.filename = path
        raise
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, "larger than 16 MiB", path)
    return content.decode(errors="replace")


def _opened_to_write(folder: str) -> OpenFolder:
    """Open a run's folder, made anew where somebody cleaned the temporary directory up: the job goes on."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        _make_again(folder)
    return opened(folder)


def _make_again(folder: str) -> None:
    base, name = os.path.split(os.path.abspath(folder))
    os.makedirs(base, mode=0o700, exist_ok=True)
    with opened(base) as parent:
        require_stable(parent)
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:  # another rank is as quick
            pass
