"""Variants: launchers with options, and their command lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.formats import PYTHON, running
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

THREADS: Final = "torchrun-threads"
SOCKET: Final = "numapin-socket"
KNOWN: Final = {
    "torchrun": "torchrun",
    "torchrun-node": "torchrun --numa-binding=node",
    THREADS: "torchrun",
    "numapin": "numapin",
    "numapin-loader": "numapin --dataloader=numapin",
    "numapin-balanced": "numapin --dataloader=numapin-balanced",
    "numapin-exclusive": "numapin --bind exclusive",
    SOCKET: "numapin --bind socket",
    "numapin-core-complex": "numapin --bind core-complex",
}
"""Name -> launcher and options. `torchrun-threads` also gets OMP_NUM_THREADS as numapin would set it."""
DEFAULT: Final = ("torchrun", THREADS, "numapin", "numapin-loader")

_STARTS: Final[dict[str, tuple[str, ...]]] = {
    "torchrun": (*PYTHON, "-m", "torch.distributed.run", "--standalone"),
    "numapin": (*running("from numapin.cli.entry import main; main()"), "run", "--quiet"),
}
_ASSIGNMENT: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_OPERATOR: Final = re.compile(r"&&?|\|\|?|\d?>>?(&\d)?|<|[\w./-]*;")  # of a shell; python -c 'a; b' has none
_FORM: Final = "write a launcher and its options, such as 'numapin --bind socket' or 'OMP_NUM_THREADS=8 torchrun'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of the things to compare.

    `shown` is the command as a user would type it; `command` is what is started, with the `variables` added to the
    environment.
    """

    name: str
    shown: tuple[str, ...]
    command: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The user's script or module with its arguments, and the number of ranks. `num_threads`: numapin's per rank."""

    words: tuple[str, ...]
    is_module: bool
    num_ranks: int
    num_threads: int


def parse_names(text: str) -> tuple[str, ...]:
    """Parse names of known variants, separated by commas; a name may come twice. Raises ValueError."""
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise ValueError(f"variant {unknown[0]!r} is not one of {', '.join(KNOWN)}")
    return names


def known_variant(name: str, script: Script) -> Variant:
    """Return a variant of `KNOWN`."""
    threads = {"OMP_NUM_THREADS": str(script.num_threads)} if name == THREADS else {}
    return _launched(name, KNOWN[name].split(), threads, script)


def own_variant(text: str, script: Script) -> Variant:
    """Return the variant of a launcher and options that the user wrote. Raises UsageError."""
    variables, words = _split(text, option="--variant")
    if words[0] not in _STARTS:
        raise UsageError(f"--variant {text!r} begins with neither torchrun nor numapin", _FORM)
    if words[:2] == ["numapin", "run"]:
        words.pop(1)
    return _launched(text, words, variables, script)


def own_command(text: str, *, option: str) -> Variant:
    """Return the variant of a whole command that the user wrote. Raises UsageError."""
    variables, words = _split(text, option=option)
    operator = next((word for word in words if _OPERATOR.fullmatch(word)), None)
    if operator is not None:
        problem = f"{option} {text!r}: {operator!r} is for a shell, and no shell runs the command"
        raise UsageError(problem, f"{option} \"bash -c 'cd folder && python train.py'\"")
    return Variant(name=option.strip("-"), shown=_with(variables, words), command=tuple(words), variables=variables)


def _split(text: str, *, option: str) -> tuple[dict[str, str], list[str]]:
    """Split a text into the variables that it sets, and the words of its command, as a shell does."""
    try:
        words = shlex.split(text)
    except ValueError:  # "No closing quotation", "No escaped character"
        what = f"{option} {text!r}: a quotation mark is not closed, or nothing follows the last backslash"
        raise UsageError(what, "close the quote; in a shell, write for example: --a 'python train.py'") from None
    variables = {}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        variables[found["name"]] = found["value"]
        words.pop(0)
    if not words:
        raise UsageError(f"{option} {text!r} names no command", _FORM)
    return variables, words


def _launched(name: str, words: Sequence[str], variables: Mapping[str, str], script: Script) -> Variant:
    number, module = ("--nproc-per-node", str(script.num_ranks)), ("-m",) if script.is_module else ()
    rest = (*number, *words[1:], *module, *script.words)
    return Variant(
        name=name,
        shown=_with(variables, ("numapin", "run", *rest) if words[0] == "numapin" else ("torchrun", *rest)),
        command=(*_STARTS[words[0]], *rest),
        variables=variables,
    )


def _with(variables: Mapping[str, str], words: Sequence[str]) -> tuple[str, ...]:
    return (*(f"{name}={value}" for name, value in variables.items()), *words)


def require_different_names(variants: Sequence[Variant]) -> None:
    """Raise UsageError if two variants have the same name, or if there is only one."""
    names = [variant.name for variant in variants]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"variant {twice!r} is given twice", "to compare identical commands: --a CMD --b CMD")
    if len(names) < 2:
        raise UsageError("a comparison needs two variants", "numapin compare --variants torchrun,numapin train.py")
