"""torchrun's options: one table, of which help, completion and the parser of `numapin run` are made.

The table has the options of torch 2.15, which has all those of 2.9 and newer; a test compares it with the parser of the
installed torch. Each option means what it means to torchrun: spellings with hyphens and underscores, abbreviations,
`--name=value`, PET_NAME.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from string import Template
from typing import TYPE_CHECKING, Any, Final

from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# torchrun runs a --run-path script in a spawned process, whose sys.path does not contain a folder of the caller.
RUN_PATH: Final = (
    "import sys; del sys.path[0]; from torch.distributed.elastic.multiprocessing.errors import record; "
    "from torch.distributed.run import run_script_path; record(run_script_path)(*sys.argv[1:])"
)
_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)
_STREAMS: Final = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", re.ASCII)


# --- what values mean ------------------------------------------------------------------------------------------------


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError("must be a number, 0 or more")
    return int(text)


def _port(text: str) -> int:
    if _number(text) >= 1 << 16:
        raise ValueError("must be a port, below 65536")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{0,6})?", text, re.ASCII):
        raise ValueError("must be a number of seconds")
    return float(text)


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    sizes = [int(word) for word in (least, most or least) if _NUMBER.fullmatch(word)]
    if len(sizes) < 2 or not 0 < sizes[0] <= sizes[1]:
        raise ValueError("must be a number of hosts, such as 2, or a range, such as 2:4")
    return sizes[0], sizes[1]


def _signals(text: str) -> str:
    unknown = [name for name in map(str.strip, text.split(",")) if name not in signal.Signals.__members__]
    if unknown:
        raise ValueError(f"must be names of signals, such as SIGTERM,SIGUSR1; {unknown[0]} is not one")
    if deadly := re.search("SIGKILL|SIGSTOP", text):
        raise ValueError(f"must be signals that a program can handle; {deadly[0]} is not one")
    return text


def _streams(text: str) -> dict[int | None, int]:
    """Return the streams, 1 stdout and 2 stderr, by local rank, or of all ranks."""
    if not _STREAMS.fullmatch(text):
        raise ValueError(
            "must be 1 (stdout), 2 (stderr), 3 (both) or 0 (neither); for some ranks only: RANK:STREAMS, e.g. 0:3,1:2"
        )
    if text.isdecimal():
        return {None: int(text)}
    return {int(rank): int(streams) for rank, _, streams in (part.partition(":") for part in text.split(","))}


def _ranks(text: str) -> frozenset[int]:
    return frozenset(map(_number, text.split(","))) if text else frozenset()


def _settings(text: str) -> dict[str, str]:
    """Return settings such as "join_timeout=600,is_host=1"."""
    parts = [part.partition("=") for part in text.strip().split(",") if part.strip()]
    if not all(equals and name.strip() and value.strip() for name, equals, value in parts):
        raise ValueError("must be KEY=VALUE,...")
    return {name.strip(): value.strip(" \"'") for name, _, value in parts}


def _texts(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


# --- the table -------------------------------------------------------------------------------------------------------


class OptionGroup(StrEnum):
    """The subject of an option of torchrun; the values are headings of the help page."""

    RANKS = "torchrun's options: ranks and program"
    HOSTS = "torchrun's options: several hosts"
    ENDING = "torchrun's options: restarts and signals"
    LOGS = "torchrun's options: output and logs"


@dataclass(frozen=True, slots=True)
class TorchrunOption:
    """An option of torchrun."""

    names: tuple[str, ...]  # with hyphens; the long one may also have underscores
    group: OptionGroup
    value: str  # its name in help texts; "": it takes none
    help: str
    words: tuple[str, ...] = ()  # values that completion offers
    choices: bool = False  # these are all values
    read: Callable[[str], Any] = str  # raises ValueError that says what the text must be
    default: Any = None
    is_file: bool = False
    is_usual: bool = False  # on the short help page
    since: tuple[int, int] = (2, 9)  # the first torch that has it

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings, as in torch's parser."""
        underscored = f"--{self.key}"
        return self.names if underscored == self.names[-1] else (*self.names, underscored)

    @property
    def key(self) -> str:
        """Its name among parsed options."""
        return self.names[-1].removeprefix("--").replace("-", "_")


_RANKS, _HOSTS, _ENDING, _LOGS = OptionGroup
_Option = TorchrunOption
_MODES: Final = ("node", "socket", "exclusive", "core-complex")
TORCHRUN_OPTIONS: Final = (
    _Option(("--nproc-per-node",), _RANKS, "N", "Ranks on this host: a number, gpu, cpu, xpu or auto (default: one per "
            "visible GPU).", words=("auto", "cpu", "gpu", "xpu"), is_usual=True),
    _Option(("-m", "--module"), _RANKS, "", "SCRIPT is a module, as in python -m.", is_usual=True),
    _Option(("--no-python",), _RANKS, "", "SCRIPT is a program that is not Python.", is_usual=True),
    _Option(("--run-path",), _RANKS, "", "Run SCRIPT, an absolute path, with runpy.run_path; wins over --no-python."),
    _Option(("--virtual-local-rank",), _RANKS, "", "Show each rank only its own GPU, as GPU 0 of local rank 0.",
            since=(2, 10)),
    _Option(("--numa-binding",), _RANKS, "MODE", "The same as --bind, which wins: node, socket, exclusive or "
            "core-complex.", words=_MODES, choices=True),
    _Option(("--role",), _RANKS, "NAME", "Role of the ranks (default: default).", default="default"),
    _Option(("--start-method",), _RANKS, "METHOD", "How torch's multiprocessing starts processes: spawn (default), "
            "fork or forkserver.", words=("spawn", "fork", "forkserver"), choices=True, default="spawn"),
    _Option(("--nnodes",), _HOSTS, "N|MIN:MAX", "Number of hosts, or a range (default: that of srun or "
            "mpirun, else 1).", read=_hosts,
            default=(1, 1), is_usual=True),
    _Option(("--rdzv-backend",), _HOSTS, "NAME", "How the hosts find each other: c10d for several hosts (default: "
            "static).", words=("c10d", "static", "etcd-v2", "etcd"), default="static", is_usual=True),
    _Option(("--rdzv-endpoint",), _HOSTS, "HOST[:PORT]", "Where the hosts meet; the same on all of them.", default="",
            is_usual=True),
    _Option(("--rdzv-id",), _HOSTS, "ID", "Id of the job, the same on all hosts.", default="none"),
    _Option(("--rdzv-conf",), _HOSTS, "KEY=VALUE,...", "More settings of the rendezvous, e.g. join_timeout=600.",
            read=_settings, default={}),
    _Option(("--standalone",), _HOSTS, "", "Run on this host only, on a free port, and ignore the --rdzv options."),
    _Option(("--node-rank",), _HOSTS, "N", "Number of this host, from 0, for the static rendezvous.", read=_number,
            default=0),
    _Option(("--master-addr",), _HOSTS, "HOST", "Address of host 0, for the static rendezvous (default: 127.0.0.1).",
            default="127.0.0.1"),
    _Option(("--master-port",), _HOSTS, "PORT", "Port on host 0, for the static rendezvous (default: a free one on one "
            "host, 29500 on several).", read=_port),
    _Option(("--local-addr",), _HOSTS, "ADDRESS", "Address of this host (default: looked up)."),
    _Option(("--max-restarts",), _ENDING, "N", "Number of restarts before the job fails (default: 0).",
            read=_number, default=0, is_usual=True),
    _Option(("--monitor-interval",), _ENDING, "SECONDS", "Seconds between checks for hosts that wait to "
            "join (default: 0.1).", read=_seconds, default=0.1),
    _Option(("--signals-to-handle",), _ENDING, "NAME,...", "Signals that end all ranks (default: "
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT).", read=_signals, default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", since=(2, 10)),
    _Option(("--shutdown-timeout",), _ENDING, "SECONDS", "Seconds between asking ranks to end and killing them "
            "(default: 30).", read=_number, since=(2, 12)),
    _Option(("--log-dir",), _LOGS, "DIR", "Folder for the logs of --tee and --redirects.", is_file=True, is_usual=True),
    _Option(("-t", "--tee"), _LOGS, "STREAMS", "Also write the ranks' output to log files: 1 stdout, 2 stderr, 3 both; "
            "for some ranks: 0:3,1:2.", read=_streams, default={None: 0}, is_usual=True),
    _Option(("-r", "--redirects"), _LOGS, "STREAMS", "Write the ranks' output to log files only; values as for --tee.",
            read=_streams, default={None: 0}),
    _Option(("--local-ranks-filter",), _LOGS, "RANK,...", "Show only the output of these local ranks.", read=_ranks,
            default=frozenset()),
    _Option(("--duplicate-stdout-filters",), _LOGS, "TEXT,...", "Also write the lines of stdout that contain one of "
            "these texts to one file.", read=_texts, default=(), since=(2, 10)),
    _Option(("--duplicate-stderr-filters",), _LOGS, "TEXT,...", "The same for stderr.", read=_texts, default=(),
            since=(2, 10)),
    _Option(("--logs-specs",), _LOGS, "NAME", "Entry point (group torchrun.logs_specs) of a class that decides where "
            "logs go."),
    _Option(("--event-log-handler",), _LOGS, "NAME", "Registered handler of torch's elastic events (default: null).",
            default="null"),
    _Option(("--log-line-prefix-template",), _LOGS, "TEXT", "Begin each line that --tee shows with this text, e.g. "
            "'${hostname}:${rank}: '.", default="", since=(2, 14)),
    _Option(("--print-completion",), _LOGS, "SHELL", "Not for numapin, whose shell completion is printed by: numapin "
            "completion SHELL.", words=("bash", "zsh", "tcsh"), since=(2, 14)),
)  # fmt: skip
"""Each option of torchrun except --help, in the order of the help page."""
_OPTION_BY_SPELLING: Final = {spelling: option for option in TORCHRUN_OPTIONS for spelling in option.spellings}


# --- the job ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A parsed command line; torchrun's options are attributes, by their keys."""

    own: tuple[str, ...]  # numapin's own options, as typed
    command: tuple[str, ...]  # the command that each rank becomes, "${local_rank}" not yet replaced
    program: str  # the script, module or program, as typed
    options: Mapping[str, Any]  # torchrun's, by their keys; None without a value or a default
    typed: frozenset[str]  # the keys of those on the command line or in PET_* variables
    is_id_typed: bool  # --rdzv-id is on the command line, where ps shows it
    shutdown_timeout_s: int
    why_torch: str = ""  # why torch serves the ranks' store; "": the launcher does
    hosts_from: str = ""  # what a resource manager said about the hosts; "" if the user's options say all

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the table says what each value is
        """Return the value of an option of torchrun."""
        try:
            return object.__getattribute__(self, "options")[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def min_max_nodes(self) -> tuple[int, int]:
        """The minimum and the maximum number of hosts."""
        return (1, 1) if self.standalone else self.nnodes

    @property
    def is_single_host(self) -> bool:
        """Whether the job runs on this host only, and so needs no rendezvous, even if an endpoint was given."""
        if self.min_max_nodes[1] > 1:
            return False
        is_static = self.rdzv_backend == "static"
        return self.standalone or self.rdzv_backend == "c10d" or (is_static and not self.rdzv_endpoint)

    @property
    def is_fixed(self) -> bool:
        """Whether the job has a fixed number of hosts, more than one, a known first host, and no restarts."""
        least, most = self.min_max_nodes
        return least == most > 1 and self.rdzv_backend == "static" and self.max_restarts == 0

    @property
    def run_id(self) -> str | None:
        """The name of the rendezvous, None if the user gave none."""
        return None if self.standalone or self.rdzv_id == "none" else self.rdzv_id

    @property
    def signals(self) -> frozenset[signal.Signals]:
        """The signals that end all ranks."""
        return frozenset(signal.Signals[name.strip()] for name in self.signals_to_handle.split(","))

    def command_of(self, local_rank: int) -> list[str]:
        """Return the command that this rank becomes; as under torch, its number is put into the arguments only."""
        program, *rest = self.command
        return [program, *(Template(word).safe_substitute(local_rank=str(local_rank)) for word in rest)]


def parse(
    arguments: Sequence[str], own: Mapping[str, bool], environ: Mapping[str, str], *, python: str, prog: str
) -> Job:
    """Parse a command line as torchrun would. Raises UsageError.

    `own` are the spellings of numapin's own options, and whether each takes a value; `python` runs scripts.
    """
    given: dict[str, str] = {}
    names: dict[str, str] = {}  # of what is given, in messages
    for option in TORCHRUN_OPTIONS:
        variable = f"PET_{option.key.upper()}"
        text = environ.get(variable)
        is_off = not option.value and text in ("", "0")
        if text is not None and not is_off:
            given[option.key], names[option.key] = text, variable
    typed: list[str] = []
    words = list(arguments)
    name = equals = value = ""
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name not in own and not name.startswith("--") and name[:2] in _OPTION_BY_SPELLING and len(name) > 2:  # -t3
            name, equals, value = word[:2], "=", word[2:]
        torchruns = None if name in own else _meant(name, prog)
        takes_value = own[name] if torchruns is None else torchruns.value
        if takes_value:
            if not equals:
                if not words or (words[0].startswith("-") and words[0] != "-"):
                    raise UsageError(f"option {name} needs a value", f"{prog} --help")
                value = words.pop(0)
        elif equals:
            raise UsageError(f"option {name} takes no value", f"{prog} --help")
        if torchruns is None:
            typed += [name, value] if own[name] else [name]
        else:
            given[torchruns.key], names[torchruns.key] = value, torchruns.names[-1]
    if "print_completion" in given:
        raise UsageError("--print-completion is for torchrun's command lines", "numapin completion SHELL")
    if not words:
        if value.endswith(".py") and not equals:
            problem = f"there is no script to run: {value} is the value of {name}"
            raise UsageError(problem, f"{prog} {name} VALUE {value}")
        raise UsageError("there is no script to run", f"{prog} train.py")
    options = {
        option.key: _value(option, given.get(option.key), names.get(option.key, ""), prog)
        for option in TORCHRUN_OPTIONS
    }
    if options["no_python"] and options["module"] and not options["run_path"]:
        raise UsageError("--no-python cannot be combined with --module", f"{prog} --help")
    if options["run_path"]:
        command = (python, "-u", f"-c{RUN_PATH}", *words)
    elif options["no_python"]:
        command = tuple(words)
    else:
        command = (python, "-u", *(["-m"] if options["module"] else []), *words)
    seconds = given.get("shutdown_timeout", environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if not _NUMBER.fullmatch(seconds):
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds} is not a number", "give seconds, such as 60")
    return Job(
        own=tuple(typed),
        command=command,
        program=words[0],
        options=options,
        typed=frozenset(given),
        is_id_typed=names.get("rdzv_id") == "--rdzv-id",
        shutdown_timeout_s=int(seconds),
    )


def _meant(name: str, prog: str) -> TorchrunOption:
    """Return the option of torchrun that a word spells, or abbreviates. numapin's own options have no abbreviations."""
    if name in _OPTION_BY_SPELLING:
        return _OPTION_BY_SPELLING[name]
    begun = [spelling for spelling in _OPTION_BY_SPELLING if len(name) > 2 and spelling.startswith(name)]
    # The installed torch may not have the newest options, and an abbreviation must not change its meaning.
    oldest = min((_OPTION_BY_SPELLING[spelling].since for spelling in begun), default=None)
    meant = {_OPTION_BY_SPELLING[spelling].key: _OPTION_BY_SPELLING[spelling] for spelling in begun}
    old = [option for option in meant.values() if option.since == oldest]
    if len(old) == 1:
        return old[0]
    if begun:
        raise UsageError(f"option {name} is ambiguous: {', '.join(begun)}", f"{prog} --help")
    raise UsageError(f"no such option '{name}'", f"{prog} --help")


def _value(option: TorchrunOption, text: str | None, name: str, prog: str) -> Any:  # noqa: ANN401 - of this option
    if not option.value:
        if text and not _NUMBER.fullmatch(text):  # of a variable
            raise UsageError(f"{name} is {text}; it must be 1 or 0", f"unset {name}")
        return text is not None
    if text is None:
        return option.default
    if option.choices and text not in option.words:
        raise UsageError(f"{name}: '{text}' is not one of {', '.join(option.words)}", f"{prog} --help")
    try:
        return option.read(text)
    except ValueError as error:
        raise UsageError(f"{name} is {text}; it {error}", f"{prog} --help") from None
