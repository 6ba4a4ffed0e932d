"""Messages about command lines that cannot be parsed: the mistake, a suggestion, and the usage in one line."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Final

import click

from numapin.base.formats import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

_HELP: Final = re.compile(r"numapin( .*)? --help$")
_CHOICE: Final = re.compile(r"'(?P<word>[^']*)' is not one of (?P<known>[^;]*)")
_UNKNOWN: Final = re.compile(
    r"(no such (?P<kind>option|command) |got unexpected extra argument )['(](?P<word>.*)[')]", re.DOTALL
)
_NUM_RANKS: Final = "--nproc-per-node"
_NAMES_ELSEWHERE: Final = ("-n", "-np", "--nprocs", "--num-processes", "--num-gpus")
"""The names of --nproc-per-node in mpirun, torch_xla, accelerate and deepspeed."""

_OTHER_COMMANDS: Final = {"numapin": "run", "run": "plan", "trace": "plan"}
"""The command that may have an option that this one lacks, such as --machine, or --nproc-per-node without `run`."""


def message_of(error: click.ClickException) -> str:
    """Return click's message in numapin's form, without click's own suggestion, which differs among its versions."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        message = f"no such option '{error.option_name}'"
    elif isinstance(error, click.UsageError) and message.startswith("No such command"):
        message = error.message
    message = message.removesuffix(".")
    return message[:1].lower() + message[1:]


def suggestion_for(message: str, command: click.Command | None) -> str:
    """Return "; did you mean X?" for a message that names an unknown word; "" if nothing known is like it."""
    choice = _CHOICE.search(message)
    if choice is not None:
        return did_you_mean(choice["word"], re.findall(r"[\w:.-]+", choice["known"]))
    unknown = _UNKNOWN.match(message)
    if unknown is None or command is None:
        return ""
    word = unknown["word"]
    if word == "help":
        return "; did you mean --help?"
    if unknown["kind"] == "option":
        return _like_option(word, command)
    if word.endswith(".py") and command.name == "numapin":
        return f"; did you mean numapin run {word}?"
    return did_you_mean(word, command.list_commands(click.Context(command))) if isinstance(command, click.Group) else ""


def _like_option(typed: str, command: click.Command) -> str:
    known, word = _options_of(command), typed.replace("_", "-")
    if word in _NAMES_ELSEWHERE:
        word = _NUM_RANKS
    if word in known:
        return f"; did you mean {word}?"
    other = _OTHER_COMMANDS.get(command.name or "")
    if other is not None and word in _options_of(getattr(import_module(f"numapin.cli.{other}"), other)):
        return f"; did you mean numapin {other} {word}?"
    return did_you_mean(typed, known)


def _options_of(command: click.Command) -> list[str]:
    """Return the long options that help shows, in their usual spelling."""
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    return sorted(filter(_is_usual, names))


def _is_usual(name: str) -> bool:
    return name.startswith("--") and "_" not in name


def command_of(hint: str, group: click.Group) -> tuple[click.Command | None, str]:
    """Return the command whose help a hint names, and its name with those of its groups. None: the hint names none."""
    words = _HELP.search(hint)
    if words is None:
        return None, ""
    path = words[1] or ""
    command: click.Command | None = group
    for word in path.split():
        command = _subcommand(command, word)
    return command, f"numapin{path}"


def typed_command(words: Sequence[str], group: click.Group) -> str:
    """Return the name of the command that the words of a command line begin with, and those of its groups.

    click's error about an option without its value does not have it.
    """
    command: click.Command | None = group
    path = ["numapin"]
    for word in words:
        command = _subcommand(command, word)
        if command is None:
            break
        path.append(word)
    return " ".join(path)


def _subcommand(command: click.Command | None, name: str) -> click.Command | None:
    return command.get_command(click.Context(command), name) if isinstance(command, click.Group) else None


def usage_of(command: click.Command, path: str) -> str:
    """Return the usage of a command in one line, as its help page has it."""
    context = click.Context(command, info_name=path, **command.context_settings)
    return " ".join([path, *command.collect_usage_pieces(context)])
