"""Messages about command lines that cannot be parsed: the mistake, a suggestion, and the usage in one line. Edge.

Comes in: an error of click, of torch's parser, or of numapin's own checks. Goes out: its message with a suggestion,
"did you mean X?", and the usage line of the command whose help the hint names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click

from numapin.base.suggest import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HELP: Final = re.compile(r"numapin( .*)? --help$")
_CHOICE: Final = re.compile(
    r"'(?P<word>[^']*)' is not one of (?P<known>[^;]*)|: '(?P<bad>[^']*)' \(choose from (?P<of>.*)\)"
)
_ARGPARSE_OPTION: Final = re.compile(r"unrecognized arguments: (?P<word>--?[\w-]+)")


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
        return _like_choice(choice)
    option = _ARGPARSE_OPTION.search(message) or re.match(r"no such option '(?P<word>.*)'", message)
    if option is not None and command is not None:
        return did_you_mean(option["word"], _options_of(command))
    name = re.match(r"no such command '(?P<word>.*)'", message)
    if name is not None and isinstance(command, click.Group):
        return did_you_mean(name["word"], command.list_commands(click.Context(command)))
    return ""


def _like_choice(choice: re.Match[str]) -> str:
    known = re.findall(r"[\w:.-]+", choice["known"] or choice["of"])
    return did_you_mean(choice["word"] or choice["bad"] or "", known)


def _options_of(command: click.Command) -> Iterable[str]:
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
