"""Stage 3: command lines that need neither torch's parser nor its agent. Pure.

Comes in: the arguments of `numapin run` and its environment. Goes out: a `DirectJob`, or why torch must read the line.
The table has the options of torchrun that mean something simple on one host without restarts, with the values for which
they do. An abbreviation, an unknown option, a value that is not in the table: torch's parser decides what they mean.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_STATIC: Final = "static"
_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torch's default
_GRACE_S: Final = 30  # torch's default


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectJob:
    """A job on one host, whose ranks the launcher starts itself. The names are those of `torchrun.Job`.

    Attributes:
        own: The arguments that are not torchrun's, as typed.
        command: The command that each rank becomes, "${local_rank}" not yet replaced.
        program: The script, module or program, as typed.
        nproc_per_node: As typed. None: numapin decides.
        numa_binding: The value of torchrun's --numa-binding.
        module: Whether `program` is a module.
        no_python: Whether `program` is not a Python script.
        virtual_local_rank: Whether each rank sees its GPU only, as local rank 0.
        role: The name of the ranks' role.
        run_id: The id of the run. None: numapin makes one.
        local_addr: The address of the ranks' store. None: the loopback.
        master_port: Its port, 0 for a free one.
        signals_to_handle: Names of the signals that end all ranks, as typed.
        shutdown_timeout_s: Seconds from SIGTERM to SIGKILL.
    """

    own: tuple[str, ...]
    command: tuple[str, ...]
    program: str
    nproc_per_node: str | None
    numa_binding: str | None
    module: bool
    no_python: bool
    virtual_local_rank: bool
    role: str
    run_id: str | None
    local_addr: str | None
    master_port: int
    signals_to_handle: str
    shutdown_timeout_s: int

    @property
    def min_max_nodes(self) -> tuple[int, int]:
        """Return the minimum and the maximum number of hosts."""
        return 1, 1

    @property
    def is_single_host(self) -> bool:
        """Return True."""
        return True

    @property
    def signals(self) -> frozenset[signal.Signals]:
        """Return the signals that end all ranks."""
        return frozenset(signal.Signals[name] for name in _signal_names(self.signals_to_handle))

    def command_of(self, local_rank: int) -> list[str]:
        """Return the command that this rank becomes; as under torch, its number is put into the arguments only."""
        program, *rest = self.command
        return [program, *(Template(word).safe_substitute(local_rank=str(local_rank)) for word in rest)]


_FLAGS: Final = ("standalone", "module", "no_python", "virtual_local_rank")
_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)


def _is_number(value: str) -> bool:
    return _NUMBER.fullmatch(value) is not None


def _is_port(value: str) -> bool:
    return _is_number(value) and int(value) < 1 << 16


def _are_signals(value: str) -> bool:
    return all(name in signal.Signals.__members__ for name in _signal_names(value))


def _signal_names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def _one_of(*words: str) -> Callable[[str], bool]:
    return words.__contains__


_VALUES: Final[Mapping[str, Callable[[str], bool]]] = {
    "nproc_per_node": lambda value: _is_number(value) or value in ("gpu", "auto"),
    "nnodes": _one_of("1", "1:1"),
    "node_rank": _one_of("0"),
    "rdzv_backend": _one_of(_STATIC, "c10d"),
    "rdzv_endpoint": lambda _: True,
    "rdzv_id": bool,
    "max_restarts": _one_of("0"),
    "monitor_interval": lambda value: re.fullmatch(r"\d{1,6}(\.\d{0,6})?", value, re.ASCII) is not None,
    "start_method": _one_of("spawn", "fork", "forkserver"),
    "role": lambda _: True,
    "master_addr": lambda _: True,
    "master_port": _is_port,
    "local_addr": bool,
    "signals_to_handle": _are_signals,
    "shutdown_timeout": _is_number,
    "numa_binding": _one_of("node", "socket", "exclusive", "core-complex"),
}
"""The options with values: whether a value is simple. What monitors and starts torch's processes has no effect here."""
_NAMES: Final = {
    **{f"--{name}": name for name in (*_FLAGS, *_VALUES)},
    **{f"--{name.replace('_', '-')}": name for name in (*_FLAGS, *_VALUES)},
    "-m": "module",
}
_OF_THE_AGENT: Final = (
    *("TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE", "TORCHELASTIC_HEALTH_CHECK_PORT"),
    *("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "TORCHELASTIC_ERROR_FILE"),
)
"""Variables that torch's agent reads in the launcher."""


class _NotDirect(Exception):  # noqa: N818 - no error: torch reads the line
    """Why torch has to read the line."""


def read_line(
    arguments: Sequence[str], own: Mapping[str, bool], environ: Mapping[str, str], *, python: str
) -> DirectJob | str:
    """Parse a command line as torch's parser would; return why torch has to do it if it is not simple enough.

    Args:
        arguments: The arguments of `numapin run`.
        own: The spellings of numapin's own options, and whether each takes a value.
        environ: The launcher's environment.
        python: The interpreter that runs scripts.
    """
    words = list(arguments)
    given: dict[str, str] = {}
    typed: list[str] = []
    try:
        _require_no_variables(environ)
        while words and words[0].startswith("-") and words[0] != "-":
            name, value = _take_option(words, own)
            if name in own:
                typed += [name] if value is None else [name, value]
            else:
                given[_NAMES[name]] = value or ""
        return _job(given, typed, words, environ, python)
    except _NotDirect as reason:
        return str(reason)


def _require_no_variables(environ: Mapping[str, str]) -> None:
    found = next((name for name in environ if name.startswith("PET_") or name in _OF_THE_AGENT), None)
    if found:
        raise _NotDirect(f"the variable {found} is set")


def _take_option(words: list[str], own: Mapping[str, bool]) -> tuple[str, str | None]:
    """Take the first option off the line; return its name and value."""
    word = words.pop(0)
    name, equals, value = word.partition("=")
    if name not in own and name not in _NAMES:
        raise _NotDirect(name)
    if _takes_value(name, own):
        value = value if equals else _next_value(words, name)
        if name not in own and not _VALUES[_NAMES[name]](value):
            raise _NotDirect(f"{name} {value}")
        return name, value
    if equals:
        raise _NotDirect(word)
    return name, None


def _takes_value(name: str, own: Mapping[str, bool]) -> bool:
    return own[name] if name in own else _NAMES[name] in _VALUES


def _next_value(words: list[str], name: str) -> str:
    if not words or words[0].startswith("-"):
        raise _NotDirect(f"{name} without a value")
    return words.pop(0)


def _job(
    given: Mapping[str, str], typed: Iterable[str], words: Sequence[str], environ: Mapping[str, str], python: str
) -> DirectJob:
    """Return the job of options that are simple each by itself."""
    _require_direct(given, words)
    run_id = None if "standalone" in given else given.get("rdzv_id")
    return DirectJob(
        own=tuple(typed),
        command=tuple(_command(given, words, python)),
        program=words[0],
        nproc_per_node=given.get("nproc_per_node"),
        numa_binding=given.get("numa_binding"),
        module="module" in given,
        no_python="no_python" in given,
        virtual_local_rank="virtual_local_rank" in given,
        role=given.get("role", "default"),
        run_id=None if run_id == "none" else run_id,
        local_addr=given.get("local_addr"),
        master_port=int(given.get("master_port", 0)),
        signals_to_handle=given.get("signals_to_handle", _SIGNALS),
        shutdown_timeout_s=_shutdown_timeout_s(given, environ),
    )


def _require_direct(given: Mapping[str, str], words: Sequence[str]) -> None:
    if not words:
        raise _NotDirect("no script")
    if words[1:2] == ["--"]:  # whether argparse drops it depends on Python's version
        raise _NotDirect("-- after the script")
    if "module" in given and "no_python" in given:
        raise _NotDirect("--no-python with -m")
    is_static = "standalone" not in given and given.get("rdzv_backend", _STATIC) == _STATIC
    if is_static and given.get("rdzv_endpoint"):
        raise _NotDirect("--rdzv-endpoint")


def _command(given: Mapping[str, str], words: Sequence[str], python: str) -> list[str]:
    if "no_python" in given:
        return [*words]
    return [python, "-u", *(["-m"] if "module" in given else []), *words]


def _shutdown_timeout_s(given: Mapping[str, str], environ: Mapping[str, str]) -> int:
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    seconds = given.get("shutdown_timeout", environ.get(variable, str(_GRACE_S)))
    if not _is_number(seconds):
        raise _NotDirect(f"{variable}={seconds}")
    return int(seconds)
