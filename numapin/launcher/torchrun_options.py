"""torchrun's options, for help and completion without torch. Pure.

Comes in: nothing. Goes out: a table of the options of torch 2.15, which has all those of 2.9 and newer. A test compares
it with the parser of the installed torch, which parses the command lines that need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class OptionGroup(StrEnum):
    """What an option of torchrun is about; the values are headings of the help page."""

    RANKS = "torchrun's options: ranks and program"
    HOSTS = "torchrun's options: several hosts"
    ENDING = "torchrun's options: restarts and signals"
    LOGS = "torchrun's options: output and logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunOption:
    """An option of torchrun.

    Attributes:
        names: Its spellings with hyphens; torch also takes the long one with underscores.
        group: What it is about.
        help: What it does, in a sentence.
        value: The name of its value in help texts. "": it takes none.
        words: Values that completion offers.
        is_file: Whether its value is a file or folder.
        is_usual: Whether the short help page shows it.
        since: The first torch that has it.
    """

    names: tuple[str, ...]
    group: OptionGroup
    help: str
    value: str = ""
    words: tuple[str, ...] = ()
    is_file: bool = False
    is_usual: bool = False
    since: tuple[int, int] = (2, 9)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all spellings, as in torch's parser."""
        long = self.names[-1]
        underscored = "--" + long.removeprefix("--").replace("-", "_")
        return self.names if underscored == long else (*self.names, underscored)

    @property
    def key(self) -> str:
        """Return its name among parsed arguments."""
        return self.names[-1].removeprefix("--").replace("-", "_")


TORCHRUN_OPTIONS: Final = (
    TorchrunOption(
        names=("--nproc-per-node",),
        group=OptionGroup.RANKS,
        value="N",
        words=("auto", "cpu", "gpu", "xpu"),
        is_usual=True,
        help="Ranks on this host: a number, gpu, cpu, xpu or auto (default: one per visible GPU).",
    ),
    TorchrunOption(
        names=("-m", "--module"),
        group=OptionGroup.RANKS,
        is_usual=True,
        help="SCRIPT is a module, as in python -m.",
    ),
    TorchrunOption(
        names=("--no-python",),
        group=OptionGroup.RANKS,
        is_usual=True,
        help="SCRIPT is a program that is not Python.",
    ),
    TorchrunOption(
        names=("--run-path",),
        group=OptionGroup.RANKS,
        help="Run SCRIPT, an absolute path, with runpy.run_path; wins over --no-python.",
    ),
    TorchrunOption(
        names=("--virtual-local-rank",),
        group=OptionGroup.RANKS,
        help="Show each rank only its own GPU, as GPU 0 of local rank 0.",
        since=(2, 10),
    ),
    TorchrunOption(
        names=("--numa-binding",),
        group=OptionGroup.RANKS,
        value="MODE",
        words=("node", "socket", "exclusive", "core-complex"),
        help="The same as --bind, which wins: node, socket, exclusive or core-complex.",
    ),
    TorchrunOption(
        names=("--role",), group=OptionGroup.RANKS, value="NAME", help="Role of the ranks (default: default)."
    ),
    TorchrunOption(
        names=("--start-method",),
        group=OptionGroup.RANKS,
        value="METHOD",
        words=("spawn", "fork", "forkserver"),
        help="How torch's multiprocessing starts processes: spawn (default), fork or forkserver.",
    ),
    TorchrunOption(
        names=("--nnodes",),
        group=OptionGroup.HOSTS,
        value="N|MIN:MAX",
        is_usual=True,
        help="Number of hosts, or its range (default: 1).",
    ),
    TorchrunOption(
        names=("--rdzv-backend",),
        group=OptionGroup.HOSTS,
        value="NAME",
        words=("c10d", "static", "etcd-v2", "etcd"),
        is_usual=True,
        help="How the hosts find each other: c10d for several hosts (default: static).",
    ),
    TorchrunOption(
        names=("--rdzv-endpoint",),
        group=OptionGroup.HOSTS,
        value="HOST[:PORT]",
        is_usual=True,
        help="Where they meet, the same on all hosts.",
    ),
    TorchrunOption(
        names=("--rdzv-id",), group=OptionGroup.HOSTS, value="ID", help="Id of the job, the same on all hosts."
    ),
    TorchrunOption(
        names=("--rdzv-conf",),
        group=OptionGroup.HOSTS,
        value="KEY=VALUE,...",
        help="More settings of the rendezvous, e.g. join_timeout=600.",
    ),
    TorchrunOption(
        names=("--standalone",),
        group=OptionGroup.HOSTS,
        help="One host only: meet on a free port, and ignore the --rdzv options.",
    ),
    TorchrunOption(
        names=("--node-rank",),
        group=OptionGroup.HOSTS,
        value="N",
        help="Number of this host, from 0, for the static rendezvous.",
    ),
    TorchrunOption(
        names=("--master-addr",),
        group=OptionGroup.HOSTS,
        value="HOST",
        help="Address of host 0, for the static rendezvous (default: 127.0.0.1).",
    ),
    TorchrunOption(
        names=("--master-port",),
        group=OptionGroup.HOSTS,
        value="PORT",
        help="Port on host 0, for the static rendezvous (default: a free one on one host, 29500 on several).",
    ),
    TorchrunOption(
        names=("--local-addr",),
        group=OptionGroup.HOSTS,
        value="ADDRESS",
        help="Address of this host (default: looked up).",
    ),
    TorchrunOption(
        names=("--max-restarts",),
        group=OptionGroup.ENDING,
        value="N",
        is_usual=True,
        help="Restarts of the ranks before the job fails (default: 0).",
    ),
    TorchrunOption(
        names=("--monitor-interval",),
        group=OptionGroup.ENDING,
        value="SECONDS",
        help="Seconds between two looks at the ranks (default: 0.1).",
    ),
    TorchrunOption(
        names=("--signals-to-handle",),
        group=OptionGroup.ENDING,
        value="NAME,...",
        help="Signals that end all ranks (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT).",
        since=(2, 10),
    ),
    TorchrunOption(
        names=("--shutdown-timeout",),
        group=OptionGroup.ENDING,
        value="SECONDS",
        help="Seconds between asking ranks to end and killing them (default: 30).",
        since=(2, 12),
    ),
    TorchrunOption(
        names=("--log-dir",),
        group=OptionGroup.LOGS,
        value="DIR",
        is_file=True,
        is_usual=True,
        help="Folder for the logs of --tee and --redirects.",
    ),
    TorchrunOption(
        names=("-t", "--tee"),
        group=OptionGroup.LOGS,
        value="STREAMS",
        is_usual=True,
        help="Also write the ranks' output to log files: 1 stdout, 2 stderr, 3 both; for some ranks: 0:3,1:2.",
    ),
    TorchrunOption(
        names=("-r", "--redirects"),
        group=OptionGroup.LOGS,
        value="STREAMS",
        help="Write the ranks' output to log files only; values as for --tee.",
    ),
    TorchrunOption(
        names=("--local-ranks-filter",),
        group=OptionGroup.LOGS,
        value="RANK,...",
        help="Show only the output of these local ranks.",
    ),
    TorchrunOption(
        names=("--duplicate-stdout-filters",),
        group=OptionGroup.LOGS,
        value="TEXT,...",
        help="Also write the lines of stdout that contain one of these texts to one file.",
        since=(2, 10),
    ),
    TorchrunOption(
        names=("--duplicate-stderr-filters",),
        group=OptionGroup.LOGS,
        value="TEXT,...",
        help="The same for stderr.",
        since=(2, 10),
    ),
    TorchrunOption(
        names=("--logs-specs",),
        group=OptionGroup.LOGS,
        value="NAME",
        help="Entry point (group torchrun.logs_specs) of a class that decides where logs go.",
    ),
    TorchrunOption(
        names=("--event-log-handler",),
        group=OptionGroup.LOGS,
        value="NAME",
        help="Registered handler of torch's elastic events (default: null).",
    ),
    TorchrunOption(
        names=("--log-line-prefix-template",),
        group=OptionGroup.LOGS,
        value="TEXT",
        since=(2, 14),
        help="Begin each line that --tee shows with this text, e.g. '${hostname}:${rank}: ' (torch 2.14 and newer).",
    ),
    TorchrunOption(
        names=("--print-completion",),
        group=OptionGroup.LOGS,
        value="SHELL",
        words=("bash", "zsh", "tcsh"),
        since=(2, 14),
        help="Print torchrun's own shell completion (torch 2.14 and newer). For numapin's: numapin completion.",
    ),
)
"""Each option of torchrun except --help, in the order of the help page."""
