"""The files and variables that a run leaves for its ranks and for other programs.

A rank takes its slice of the plan out of its environment.

Each rank imports this before its program starts, without json: a slice is a few words for the rank itself, and the JSON
for its program, which the rank does not parse. `launcher/run_folder.py` makes and finds the folders.
"""

from __future__ import annotations

import errno
import os
import sys

from numapin.base.cpu_set import CpuSet
from numapin.base.files import FOLDER, OpenFolder, open_file, opened, replace_at, require_own, require_stable, unwritten
from numapin.base.stderr import say
from numapin.errors import NumapinError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from typing import Final

    from numapin.plan.model import Plan, RankPlan

PLAN: Final = "plan.json"
COMMAND: Final = "command.json"
REPORT: Final = "failure.txt"
LOGS: Final = "logs"  # a folder with the ranks' output, unless --log-dir names another
OBSERVED: Final = "observed-"
LOADERS: Final = "loaders-"
"""The start of the names of records: of how a rank was bound, and of the loaders of a process."""
SLICE: Final = "NUMAPIN_SLICE"
"""The variable with a rank's own slice."""
MAX_FILE_BYTES: Final = 16 << 20
_MOST_FILES: Final = 1 << 17  # in a run's folder: some for each of 4096 ranks, and for each of its restarts
REMEDY: Final = "name another with NUMAPIN_RUN_DIR=DIR"


class RankSlice:
    """The parts of a `RankPlan` that a rank needs to bind itself, under the same names; `json` is the whole plan."""

    __slots__ = ("cpus", "json", "memory", "nic_variables", "node", "nodes", "num_threads", "within")

    def __init__(self, text: str) -> None:
        """Parse the text of a slice. Raises ValueError and KeyError."""
        words, brace, rest = text.partition("{")
        fields = {word.partition("=")[0]: word.partition("=")[2] for word in words.split()}
        self.cpus = CpuSet.parse(fields["cpus"])
        self.nodes = CpuSet.parse(fields["nodes"])
        self.memory = fields["memory"]
        self.within = CpuSet.parse(fields["within"]) if fields["within"] else None
        self.node = int(fields["node"]) if fields["node"] else None
        self.num_threads = int(fields["num_threads"])
        self.nic_variables = dict(setting.split("=") for setting in fields["nic"].split(",") if setting)
        self.json = brace + rest


def slice_text(rank: RankPlan) -> str:
    """Return the text of a slice: `cpus=0-3 nodes=0 memory=bind within= node=0 num_threads=4 nic= {"local_rank": 0}`.

    `nic` are the variables of --nic-env, such as `UCX_NET_DEVICES=mlx5_0:1`, separated by commas.
    """
    from numapin.base.strict_json import encode
    from numapin.plan.nics import exported

    node = "" if rank.node is None else rank.node
    nic = ",".join(f"{name}={value}" for name, value in exported(rank).items())
    plain = f"cpus={rank.cpus} nodes={rank.nodes} memory={rank.memory} within={rank.within or ''} node={node}"
    return f"{plain} num_threads={rank.num_threads} nic={nic} {encode(rank.to_json(), indent=None)}"


def records(folder: str, kind: str = OBSERVED) -> list[str]:
    """Return the paths of the records of one kind that the ranks of a run wrote. Raises OSError."""
    with opened(folder) as descriptor:
        return [os.path.join(folder, name) for name in record_names(descriptor, kind)]


def record_names(folder: int, kind: str = OBSERVED) -> list[str]:
    """Return the names of the records of one kind in an opened folder. Raises OSError, also for too many files."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        for num_files, entry in enumerate(entries):
            if num_files == _MOST_FILES:
                raise OSError(errno.E2BIG, f"more than {_MOST_FILES} files", kind)
            if entry.name.startswith(kind) and entry.name.endswith(".json"):
                names.append(entry.name)
    return names


def write_json(folder: str, name: str, content: object) -> None:
    """Write a JSON file into the folder, whole or not at all. Raises NumapinError that names it."""
    from numapin.base.strict_json import encode

    write_text(folder, name, encode(content) + "\n")


def write_text(folder: str, name: str, text: str) -> None:
    """Write a file into the folder, whole or not at all. Raises NumapinError that names it."""
    try:
        with opened_to_write(folder) as descriptor:
            replace_at(descriptor, name, text, mode=0o600)
    except (OSError, ValueError) as error:
        raise unwritten(os.path.join(folder, name), error, REMEDY) from None


def hand_over(plan: Plan, run_dir: str, environ: MutableMapping[str, str]) -> None:
    """Hand the plan to other programs, in the run directory; if that cannot be written, warn.

    Ranks have their slices in their environment: restarted ones find them there even after a clean-up of /tmp.
    """
    from numapin.base.redact import without_secrets

    environ["NUMAPIN_RUN_DIR"] = run_dir
    try:
        write_json(run_dir, PLAN, plan.to_json())
        write_json(run_dir, COMMAND, {"argv": without_secrets(sys.argv), "pid": os.getpid()})
    except NumapinError as error:
        say(f"warning: no record of this run: {error.message}")


def planned(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the JSON of the run directory's plan, and its path; None if there is no plan.

    Raises OSError for a file that a run cannot have written.
    """
    if not environ.get("NUMAPIN_RUN_DIR"):
        return None
    path = os.path.join(environ["NUMAPIN_RUN_DIR"], PLAN)
    try:
        return read_text(path), path
    except (FileNotFoundError, NotADirectoryError):
        return None


def take_slice(environ: MutableMapping[str, str]) -> RankSlice:
    """Take a rank's slice out of its environment. Raises NumapinError if there is none."""
    text = environ.pop(SLICE, "")
    try:
        return RankSlice(text)
    except (ValueError, KeyError):
        raise NumapinError(f"{SLICE} is not what numapin writes: {text[:60]!r}", "start the run again") from None


def read_text(path: str) -> str:
    """Return the text of a file in a run directory. Raises OSError, also for a file that a run cannot have written."""
    folder, name = os.path.split(os.path.abspath(path))
    try:
        with opened(folder) as descriptor:
            return read_at(descriptor, name)
    except OSError as error:
        error.filename = path
        raise


def read_at(folder: int, name: str) -> str:
    """Return the text of a file in an opened run directory. Raises as `read_text`."""
    with os.fdopen(open_file(folder, name), "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, "larger than 16 MiB", name)
    return content.decode(errors="replace")


def folder_id(folder: str) -> tuple[int, int] | None:
    """Return device and inode of a run's folder; None if it is gone, or if others can replace it."""
    try:
        with opened_to_write(folder) as descriptor:
            found = os.fstat(descriptor)
            return found.st_dev, found.st_ino
    except OSError:
        return None


def opened_to_write(folder: str) -> OpenFolder:
    """Open a run's folder. It is not made again: its name may now be another user's.

    Raises OSError, also if it is not this user's, or if others may replace what is in it. Another user who may rename
    the folder cannot put one of this user's from elsewhere in its place: Linux moves a folder to another one only for
    users who may write to it.
    """
    base, name = os.path.split(os.path.abspath(folder))
    with opened(base) as parent:
        run = OpenFolder(os.open(name, FOLDER, dir_fd=parent))
    with run as descriptor:
        require_own(descriptor)
        require_stable(descriptor)
        return OpenFolder(os.dup(descriptor))
