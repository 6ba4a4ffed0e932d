"""The output of ranks in files: --log-dir, --redirects, --tee and their filters, as torchrun writes them.

The files are torchrun's: LOG_DIR/RUN-ID_RANDOM/attempt_N/LOCAL_RANK/{stdout.log,error.json,…}.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import suppress
from string import Template
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

from numapin.base.files import OpenPlace, make_folders, open_at, opened
from numapin.base.stderr import say
from numapin.errors import UsageError
from numapin.rank.handover import LOGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.launcher.hosts import HostPlace
    from numapin.launcher.options import Job

_LOOK_S: Final = 0.1
_MOST_CHARACTERS: Final = 1 << 20  # of a file in one look: a rank that writes without a pause must not hide the others
_STREAMS: Final = (("stdout", 1), ("stderr", 2))
_REMEDY: Final = "choose a folder that you can write to, with room: --log-dir DIR"


class RankOutput(NamedTuple):
    """Files of a rank: its error, and its output by stream; "" is the launcher's own stream."""

    error: str
    stdout: str = ""
    stderr: str = ""

    @property
    def logs(self) -> tuple[str, ...]:
        """The files with output of the rank."""
        return tuple(path for path in (self.stdout, self.stderr) if path not in ("", os.devnull))


class Logs:
    """The logs of a job, a folder for each attempt, and the thread that shows the lines of --tee."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = ""
        self._ended = threading.Event()
        self._tail: threading.Thread | None = None
        self._lost = {name for name, _bit in _STREAMS if getattr(sys, name) is None}  # streams that take no lines

    def begin(self, attempt: int, place: HostPlace, run_dir: str) -> list[RankOutput]:
        """Make the folders of an attempt, and begin to show the lines of --tee; return the files of each rank."""
        job, again = self._job, f"-{attempt}" if attempt else ""
        folder = self._make_folders(attempt, place, run_dir) if {"log_dir", "tee", "redirects"} & job.typed else ""
        files, shown = [], []
        for local_rank in range(place.num_ranks):
            own = os.path.join(folder, str(local_rank))
            error = os.path.join(own, "error.json") if folder else f"{run_dir}/error-{local_rank}{again}.json"
            with suppress(OSError), opened(os.path.dirname(error)) as where:
                os.unlink(os.path.basename(error), dir_fd=where)  # of ranks that ended because another host joined
            is_shown = not job.local_ranks_filter or local_rank in job.local_ranks_filter
            teed, redirected = (of.get(None, of.get(local_rank, 0)) for of in (job.tee, job.redirects))
            paths = {}
            for stream, bit in _STREAMS:
                is_teed = bool(teed & bit)
                if is_teed or redirected & bit:
                    paths[stream] = os.path.join(own, f"{stream}.log")
                    if is_teed and is_shown:
                        shown.append((local_rank, stream, paths[stream]))
                else:
                    paths[stream] = "" if is_shown else os.devnull
            files.append(RankOutput(error, **paths))
        self._ended = threading.Event()
        if shown:
            self._tail = threading.Thread(
                target=self._show, args=(shown, folder, place.first_rank), name="numapin-tee", daemon=True
            )
            self._tail.start()
        return files

    def _make_folders(self, attempt: int, place: HostPlace, run_dir: str) -> str:
        """Make an empty folder for each rank, and return the folder of the attempt. Raises UsageError."""
        base = self._job.log_dir or os.path.join(run_dir, LOGS)
        try:
            base = os.path.abspath(base)  # a rank may change its folder
            if os.path.dirname(self._folder) != base:  # at first, and if the run goes on in another folder
                run_id = (self._job.run_id or place.run_id).replace("/", "_")
                self._folder = os.path.join(base, f"{run_id}_{os.urandom(8).hex()}")
                if not self._job.log_dir:
                    say(f"logs of the ranks: {self._folder}")
            make_folders(self._folder)  # again if it was removed meanwhile
            folder = os.path.join(self._folder, f"attempt_{attempt}")
            with opened(self._folder) as parent:
                shutil.rmtree(os.path.basename(folder), ignore_errors=True, dir_fd=parent)  # never a link's target
            for local_rank in range(place.num_ranks):
                with OpenPlace(os.path.join(folder, str(local_rank), "error.json"), make=True):
                    pass
            for stream, _bit in _STREAMS:
                if getattr(self._job, f"duplicate_{stream}_filters"):  # as under torchrun, also if no line matches
                    os.close(open_at(f"{folder}/filtered_{stream}.log", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError as error:
            raise UsageError(f"no folder for logs can be made in {base}: {error.strerror}", _REMEDY) from None
        return folder

    def close(self) -> None:
        """Show what is left of the lines of this attempt."""
        self._ended.set()
        if self._tail is not None:
            self._tail.join()
            self._tail = None

    def _show(self, shown: list[tuple[int, str, str]], folder: str, first_rank: int) -> None:
        """Copy lines of the files to the launcher's streams, behind a prefix; and those of the filters to a file."""
        template = (
            self._job.log_line_prefix_template
            or os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
            or "[${role_name}${local_rank}]:"
        )
        sources: list[tuple[TextIO, str, str, tuple[str, ...], str]] = []
        for local_rank, stream, path in shown:
            prefix = Template(template).safe_substitute(
                role_name=self._job.role,
                local_rank=local_rank,
                rank=first_rank + local_rank,
                hostname=os.uname().nodename,
            )
            try:
                source = open(path, "a+", errors="replace", opener=open_at)  # noqa: SIM115 - as long as the rank runs
            except OSError as error:  # no room for a new file
                say(f"no lines of {path} are shown: {error.strerror}")
                continue
            source.seek(0)
            filters, filtered = getattr(self._job, f"duplicate_{stream}_filters"), f"{folder}/filtered_{stream}.log"
            sources.append((source, stream, prefix, filters, filtered))
        # A process that a rank left behind may write on: what is shown ends where the files ended when the ranks did.
        sizes: list[int] = []
        is_behind = is_last = False
        while not is_last:
            if self._ended.wait(0 if is_behind else _LOOK_S):
                sizes = sizes or [os.fstat(file.fileno()).st_size for file, *_ in sources]
                # Python reads ahead by 8 KiB, which one look takes.
                is_last = all(file.buffer.tell() >= size for (file, *_), size in zip(sources, sizes, strict=True))
            is_behind = False
            for file, stream, prefix, filters, filtered in sources:
                lines = file.readlines(_MOST_CHARACTERS)
                is_behind |= sum(map(len, lines)) > _MOST_CHARACTERS
                self._show_on(stream, [f"{prefix}{line}" for line in lines])
                matching = [f"{prefix}{line}" for line in lines if any(text in line for text in filters)]
                if matching:
                    # The disk may be full.
                    with suppress(OSError), open(filtered, "a", errors="replace", opener=open_at) as copies:
                        copies.writelines(matching)
        for file, *_ in sources:
            file.close()

    def _show_on(self, stream: str, lines: Sequence[str]) -> None:
        """Write lines to a stream of the launcher, until that fails."""
        if not lines or stream in self._lost:
            return
        try:
            target = getattr(sys, stream)
            target.write("".join(lines))
            target.flush()
        except OSError as error:
            self._lost.add(stream)
            say(f"no more lines are shown on {stream}: {error.strerror}; all are in {self._folder}")
