"""The account of a failed job: one block of at most 20 lines and 80 columns, and a longer text for a file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

from numapin.base.text import listed, printable, printable_lines
from numapin.launcher.failure import LIBRARY, likely_cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.launcher.failure import EndedRank, JobFailure

NUM_LINES: Final = 20
NUM_COLUMNS: Final = 80
_TITLE_COLUMNS: Final = NUM_COLUMNS - len("numapin: error: ")
_LABEL: Final = 10
_TEXT_COLUMNS: Final = NUM_COLUMNS - _LABEL
_LINES_OF_FRAMES: Final = 8
_LINES_OF_PATH: Final = 3
_LINES: Final = {"failed": 4, "likely": 4, "next": 3}
_LINES_WITH_EXCEPTION: Final = {"failed": 2, "likely": 3, "next": 2}
"""The most lines of rows: of an exception alone or a cause alone, and of both."""
_FRAME: Final = re.compile(r'(?P<before>\s*File ")(?P<path>.*)(?P<after>", line \d+, in .*)')
_MARKS: Final = re.compile(r"[\s~^]*")
_FILE: Final = '  File "'
_CODE: Final = "    "
_RECORD: Final = "/torch/distributed/elastic/multiprocessing/errors/__init__.py"


def failure_block(failure: JobFailure, *, file: str) -> list[str]:
    """Return the block; its first line goes after "numapin: error: ". `file` has the whole traceback, "" if none."""
    rank = failure.first
    if failure.elsewhere is not None:
        first = failure.elsewhere
        host = f"{first.number} ({first.host})"
        where = _row("host", _wrapped(host, 2))
        if first.rank is not None:
            where = _row("rank", _wrapped(f"{first.rank}, the first to fail: host {host}", 2))
        return [
            _cut(f"{printable(failure.program)} failed", _TITLE_COLUMNS),
            *where,
            *_row("failed", _wrapped(first.reason, _LINES["failed"])),
            *_row("next", ["see what numapin printed there"]),
            *_row("here", _wrapped(_others(failure.ranks), 2)),
            *_row("were in", _wrapped(_places(failure.ranks), 2)),
            *_row("more", _wrapped(file, _LINES_OF_PATH)),
        ]
    cause, advice = likely_cause(failure)
    most = _LINES_WITH_EXCEPTION if rank.exception and cause else _LINES
    why = _wrapped(failure.why_first, 2)
    local = "" if rank.local_rank == rank.rank else f" (local rank {rank.local_rank})"
    gpu = "no GPU" if rank.gpu is None else f"GPU {rank.gpu}"
    node = "node unknown" if rank.node is None else f"node {rank.node}"
    process = f"pid {rank.pid}, host {printable(failure.host)}"
    above = [
        *_row("rank", _wrapped(f"{rank.rank}{local}, the first to fail{failure.where}: {gpu}, {node}, {process}", 2)),
        *_row("failed", _reason(rank, most["failed"])),
        *_row("why", why),
    ]
    below = [
        *_row("likely", _wrapped(cause, most["likely"] - len(why))),
        *_row("next", _wrapped(advice, most["next"])),
        *_row("others", _wrapped(_others(failure.ranks[1:]), 2)),
    ]
    end = [
        *_row("log", [line for log in rank.logs[-1:] for line in _wrapped(log, _LINES_OF_PATH)]),
        *_row("more", [*_wrapped(file, _LINES_OF_PATH), "all frames on the terminal: numapin run --traceback …"]),
    ]
    room = NUM_LINES - 1 - len(above) - len(below) - len(end)
    places = _row("were in", _wrapped(_places(failure.ranks[1:]), 2))[:room]
    frames = _row("at", _last_frames(rank, room - len(places)))
    return [_cut(f"{printable(failure.program)} failed", _TITLE_COLUMNS), *above, *frames, *below, *places, *end]


def failure_text(failure: JobFailure) -> str:
    """Return the failure and what all ranks recorded, as a file has it."""
    parts = [f"{failure.program} failed on {failure.host}: {failure.summary}"]
    moment = "the job" if failure.elsewhere else f"rank {failure.first.rank}"
    for rank in failure.ranks:
        parts += [f"--- rank {rank.rank} (pid {rank.pid}), {rank.state}: {rank.end}", *traceback_lines(rank)]
        if rank.stack:
            parts += [f"when {moment} had failed, it was here:", rank.stack.rstrip()]
    return "\n".join(printable_lines(part) for part in parts) + "\n"


def traceback_lines(rank: EndedRank) -> list[str]:
    """Return the whole traceback of a rank, or its message alone, as lines of visible characters."""
    return printable_lines(rank.traceback or rank.exception or "no exception was recorded").split("\n")


def _reason(rank: EndedRank, num_lines: int) -> list[str]:
    """Return the exception, in this many lines, or how the process ended; both if it has an unusual end."""
    if not rank.exception:
        return [_end(rank)]
    origin = f"raised from {rank.raised_from}" if rank.raised_from else ""
    details = [text for text in (rank.raised_in, origin, "; ".join(rank.chain[-1].members)) if text]
    if num_lines <= 2:
        details = _wrapped("; ".join(details), 1)
    else:
        details = [line for text in details for line in _wrapped(text, 2)][: num_lines - 1]
    has_usual_end = rank.exitcode == 1 and not rank.is_left
    end = [] if has_usual_end else [f"then {_end(rank)}"]
    # Of the exception, as many lines as are left; each of several lines may be broken once.
    left = num_lines - len(details)
    begin = rank.exception.split("\n", left + 1)[: left + 1]
    lines = [line for text in begin for line in _wrapped(text, 2 if len(begin) > 1 else left)]
    if len(lines) > left:
        lines = [*lines[: left - 1], f"{lines[left - 1]}…"]
    return [*lines, *details, *end]


def _end(rank: EndedRank) -> str:
    if rank.has_our_end:
        return f"ended by numapin ({rank.end})"
    return f"killed by {rank.end}" if rank.exitcode < 0 else rank.end


def _last_frames(rank: EndedRank, num_lines: int) -> list[str]:
    """Return the user's innermost frame and the last ones that fit, without torch's @record and the exception."""
    frames: list[list[str]] = []
    for line in rank.chain[-1].frames:
        if line.startswith(_FILE):
            frames.append([line])
        elif line.startswith(_CODE) and frames and not _MARKS.fullmatch(line):
            frames[-1].append(line)
    paths = [frame[0].removeprefix(_FILE).partition('",')[0] for frame in frames]
    kept = [number for number, path in enumerate(paths) if not path.endswith(_RECORD)]
    own = next((number for number in reversed(kept) if not LIBRARY.search(paths[number])), None)
    most = min(num_lines, _LINES_OF_FRAMES)
    while len(kept) > 1 and sum(len(frames[number]) for number in kept) > most:
        del kept[1 if kept[0] == own else 0]
    return [_frame(line) for number in kept for line in frames[number]][:most]


def _frame(line: str) -> str:
    """Return a line of a traceback that fits; a long path loses its beginning, other text its end."""
    text = printable(line.removeprefix("  "))
    found = _FRAME.fullmatch(text)
    if found and cell_len(text) > _TEXT_COLUMNS:
        room = _TEXT_COLUMNS - cell_len(found["before"] + found["after"]) - 1
        text = f"{found['before']}…{found['path'][-max(room, 12) :]}{found['after']}"
    return _cut(text, _TEXT_COLUMNS)


def _others(others: Sequence[EndedRank]) -> str:
    """Return what these ranks did: how many had finished, failed too, or were running and were ended."""
    groups: defaultdict[str, list[EndedRank]] = defaultdict(list)
    for rank in others:
        has_crashed = rank.state == "failed" and not rank.failed_by_itself
        groups["crashed" if has_crashed else rank.state].append(rank)
    parts = []
    for fate in ("left", "failed", "crashed", "ended", "finished"):
        ranks = groups[fate]
        if not ranks:
            continue
        names, is_one = listed("rank", [rank.rank for rank in ranks]), len(ranks) == 1
        counts = Counter(rank.end for rank in ranks).most_common()
        # The most frequent first: "3 by SIGTERM, 1 by SIGKILL".
        ends = counts[0][0] if len(counts) == 1 else ", ".join(f"{number} {end}" for end, number in counts[:3])
        words = {
            "left": f"{'is' if is_one else 'are'} still there after SIGKILL ({names})",
            "failed": f"failed later ({names})",
            "crashed": f"failed while numapin ended {'it' if is_one else 'them'} ({names}: {ends})",
            "ended": f"{'was' if is_one else 'were'} running and ended by numapin ({ends})",
            "finished": "had finished",
        }
        parts.append(f"{len(ranks)} {words[fate]}")
    return "; ".join(parts) or "no other rank ran on this host"


def _places(others: Sequence[EndedRank]) -> str:
    """Return where the ranks were that numapin ended: "ranks 0-1: barrier, train.py:8"; the commonest place first."""
    ranks = defaultdict(list)
    for rank in others:
        if rank.was_in and not rank.failed_by_itself:
            ranks[rank.was_in].append(rank.rank)
    places = sorted(ranks, key=lambda place: -len(ranks[place]))
    return "; ".join(f"{listed('rank', sorted(ranks[place]))}: {place}" for place in places)


def _row(label: str, lines: Sequence[str]) -> list[str]:
    """Return a labelled row of lines, none without text."""
    titles = [f"  {label}", *[""] * len(lines)]
    return [f"{title:{_LABEL}}{_cut(line, _TEXT_COLUMNS)}" for title, line in zip(titles, lines, strict=False) if line]


def _wrapped(text: str, num_lines: int) -> list[str]:
    """Return text in at most this many lines."""
    begin = text[: 2 * num_lines * _TEXT_COLUMNS]  # `wrap` takes minutes for megabytes without a blank
    width = _TEXT_COLUMNS if cell_len(begin) == len(begin) else _TEXT_COLUMNS // 2  # a letter may take two columns
    lines = wrap(printable(begin), width, break_on_hyphens=False)
    return [*lines[: num_lines - 1], " ".join(lines[num_lines - 1 :])] if len(lines) > num_lines else lines


def _cut(text: str, columns: int) -> str:
    """Return the text, cut with "…" if it does not fit."""
    if cell_len(text) <= columns:
        return text
    while cell_len(text) > columns - 1:
        text = text[:-1] if len(text) <= columns else text[:columns]
    return f"{text}…"
