"""What the user asked `numapin job` for. Pure.

Comes in: options, already parsed. Goes out: a `JobRequest`, checked as far as it can be without a cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from numapin.base.bounds import MAX_CPUS, MAX_GPUS, MAX_NUMBER, MAX_RANKS
from numapin.errors import UsageError
from numapin.jobs import image

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,62}")
_QUEUE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@/+-]{0,127}")
_IMAGE: Final = re.compile(r"[A-Za-z0-9./_][A-Za-z0-9._:/@#+=-]{0,511}")
_MAX_NODES: Final = 100_000


class Form(StrEnum):
    """What the manager starts, and what that becomes."""

    NODE = "node"
    """One task a node: `numapin run`, which starts the ranks and meets the other nodes over c10d."""
    TASK = "task"
    """One task a rank: `numapin exec`, which binds it."""


class KubernetesKind(StrEnum):
    """What a Kubernetes cluster runs."""

    JOB = "job"
    PYTORCHJOB = "pytorchjob"


class Launch(StrEnum):
    """What the first word of the command is, in torchrun's words."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What the user asked for. Raises UsageError for what cannot be.

    `gpus_per_node` 0 is a job without GPUs. `cpus_per_task` are those of what the manager starts: of a node's launcher
    or of one rank, as the form says; None leaves it to the manager. `whole_nodes` is for jobs that share a node with
    nobody. `options` are the binding options, ready to be typed, `setup` shell lines that run first. `name` empty is
    one made of the script's.
    """

    command: tuple[str, ...]
    gpus_per_node: int
    launch: Launch = Launch.SCRIPT
    form: Form = Form.NODE
    name: str = ""
    nodes: int = 1
    ranks_per_node: int = 0
    """0 is one a GPU, or one where there is none."""
    cpus_per_task: int | None = None
    memory_bytes: int | None = None
    whole_nodes: bool = False
    smt: bool = True
    time_s: int | None = None
    signal_s: int | None = None
    requeue: bool = False
    queue: str | None = None
    account: str | None = None
    container: str | None = None
    hostfile: str | None = None
    options: tuple[str, ...] = ()
    dataloader: bool = False
    setup: tuple[str, ...] = ()
    kind: KubernetesKind = KubernetesKind.JOB
    sys_nice: bool = True
    """Whether pods may set memory policies."""

    def __post_init__(self) -> None:
        """Check what can be checked without a cluster."""
        self._check_numbers()
        self._check_times()
        self._check_words()
        if self.dataloader and self.form is Form.TASK:
            raise UsageError(
                "--dataloader numapin with --form task: numapin exec leaves the script's DataLoaders as they are",
                "use --form node, or numapin.DataLoader in the script",
            )

    @property
    def ranks(self) -> int:
        """Return the number of ranks on each node."""
        return self.ranks_per_node or max(self.gpus_per_node, 1)

    @property
    def tasks_per_node(self) -> int:
        """Return how many tasks the manager starts on each node."""
        return 1 if self.form is Form.NODE else self.ranks

    @property
    def cpus_per_node(self) -> int | None:
        """Return how many CPUs the tasks of one node take."""
        return None if self.cpus_per_task is None else self.cpus_per_task * self.tasks_per_node

    @property
    def job_name(self) -> str:
        """Return the name that was given, or one made of the script's."""
        return self.name or name_of(self.command[0])

    def _check_numbers(self) -> None:
        for option, number, least, most in (
            ("--nodes", self.nodes, 1, _MAX_NODES),
            ("--gpus-per-node", self.gpus_per_node, 0, MAX_GPUS),
            ("--ranks-per-node", self.ranks_per_node, 0, MAX_RANKS),
            ("--cpus-per-task", self.cpus_per_task, 1, MAX_CPUS),
            ("--mem-per-node", self.memory_bytes, 1 << 20, MAX_NUMBER),
        ):
            if number is not None and number < least:
                raise UsageError(f"{option} is {number}; it must be at least {least}", "numapin job --help")
            if number is not None and number > most:
                raise UsageError(f"{option} is {str(number)[:20]}; it must be at most {most}", "numapin job --help")
        if self.gpus_per_node and self.ranks > self.gpus_per_node:
            raise UsageError(
                f"--ranks-per-node {self.ranks} are more than the {self.gpus_per_node} GPUs of a node",
                f"a rank drives a GPU of its own: --ranks-per-node {self.gpus_per_node}, or more --gpus-per-node",
            )

    def _check_times(self) -> None:
        if self.signal_s is None:
            return
        if not 1 <= self.signal_s <= 65535:
            raise UsageError(f"--signal is {self.signal_s} seconds; it must be 1 to 65535", "for example: --signal 300")
        if self.time_s is None:
            raise UsageError("--signal is seconds before the time limit, and there is none", "give one with --time")
        if self.signal_s >= self.time_s:
            raise UsageError(
                f"--signal {self.signal_s} is not before the end: --time is {self.time_s} seconds",
                "give the job more time, or less to save in",
            )

    def _check_words(self) -> None:
        for option, word, pattern, sample in (
            ("--job-name", self.name or None, _NAME, "letters, digits and . _ + -, at most 63, such as train-7b"),
            ("--partition/--queue", self.queue, _QUEUE, "letters, digits and _ . , : @ / + -, such as gpu"),
            ("--account", self.account, _QUEUE, "letters, digits and _ . , : @ / + -, such as physics"),
            ("--container", self.container, _IMAGE, image.SAMPLE),
        ):
            if word is not None and not pattern.fullmatch(word):
                raise UsageError(f"{option} {word!r} is no name that job scripts can hold", f"use {sample}")
        if self.container:
            image.require_known(self.container)
        if not self.command or not self.command[0]:
            raise UsageError("there is no script to run", "name it last: numapin job slurm --nodes 2 train.py --lr 0.1")
        if self.command[0].startswith("-"):
            raise UsageError(f"the script's name {self.command[0]!r} begins with a dash", f"write ./{self.command[0]}")
        for word in (*self.command, *self.options, *self.setup, self.hostfile or ""):
            if "\0" in word or not _is_text(word):
                raise UsageError(f"{word!r} is not text that a script can hold (UTF-8)", "rename the file, or quote it")


def name_of(script: str) -> str:
    """Return a job name made of a script's: its last part without .py, what no engine's name holds taken out."""
    last = script.rstrip("/").rpartition("/")[2].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9]+", "-", last, flags=re.ASCII).strip("-")[:40].strip("-") or "numapin"


def _is_text(word: str) -> bool:
    """Return whether a word has a UTF-8 form: an argument that had none comes with lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)
