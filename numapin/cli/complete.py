"""Candidates for completing a command line.

Never imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from click.core import Context
    from click.shell_completion import CompletionItem

_LONGEST_HELP: Final = 70
_SENTENCE_END: Final = re.compile(r"(?<!e\.g)\.(?: |$)|;")
_BY_SHELL: Final = ("file", "dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates at the cursor.

    Attributes:
        words: Whole words, each with a description or "".
        files: "file" or "dir", if such names are valid, too.
        prefix: The start of the word that precedes a value: "--output=".
        command_at: The number of the word that begins another program's command line; None without one.
    """

    words: tuple[tuple[str, str], ...] = ()
    files: str = ""
    prefix: str = ""
    command_at: int | None = None


def complete(group: click.Group, words: Sequence[str]) -> Candidates:
    """Return the candidates for the last of the words, which follow the program's name."""
    *before, incomplete = words or [""]
    command, path, rest = _find(group, before)
    context = command.make_context(path, list(rest), resilient_parsing=True)
    with context:
        return _Line(context, rest, incomplete, begin=len(before) - len(rest)).candidates()


def _find(group: click.Group, words: Sequence[str]) -> tuple[click.Command, str, Sequence[str]]:
    """Return the command that the words name, its path, and the words after it."""
    command: click.Command = group
    path, rest = [group.name or ""], list(words)
    while isinstance(command, click.Group) and rest:
        name = rest.pop(0)
        found = None if name.startswith("-") else command.get_command(click.Context(command), name)
        if found is not None:
            command = found
            path.append(name)
    return command, " ".join(path), rest


@dataclass(frozen=True, slots=True)
class _Line:
    """The words of one command; `begin` of the line's words precede them."""

    context: Context
    words: Sequence[str]
    incomplete: str
    begin: int

    @property
    def command(self) -> click.Command:
        return self.context.command

    def candidates(self) -> Candidates:
        """Return the candidates for the incomplete word."""
        last = self.words[-1] if self.words else ""
        if self._takes_tail() and (self._tail() or last == "--"):
            return self._in_tail()
        if self.incomplete.startswith("-"):
            return self._option_or_its_value()
        option = self._option(last)
        return self._word() if option is None else self._value(option, self.incomplete)

    def _option_or_its_value(self) -> Candidates:
        """Return the names of options, or the values after "--option="."""
        name, equals, value = self.incomplete.partition("=")
        option = self._option(name) if equals else None
        return self._option_names() if option is None else self._value(option, value, prefix=f"{name}=")

    def _word(self) -> Candidates:
        """Return candidates for a word that is neither an option nor its value."""
        if isinstance(self.command, click.Group):
            return Candidates(words=tuple(self._subcommands(self.command)))
        return self._in_tail() if self._takes_tail() else self._argument()

    def _takes_tail(self) -> bool:
        """Return whether another program's command line can end this one: `exec -- CMD`, `run SCRIPT`."""
        return bool(self._arguments()) and not self.context.allow_interspersed_args

    def _tail(self) -> list[str]:
        """Return the typed words of the other program's command line."""
        given = [self.context.params.get(str(argument.name)) for argument in self._arguments()]
        values = [value if isinstance(value, tuple) else (value,) for value in given if value is not None]
        return [word for value in values for word in value]

    def _in_tail(self) -> Candidates:
        """Let the shell complete the other program's words; a script's are files, as far as numapin can know."""
        runs_program = self.command.name == "exec" or bool(self.context.params.get("no_python"))
        if runs_program:
            return Candidates(command_at=self.begin + len(self.words) - len(self._tail()))
        name, equals, _ = self.incomplete.partition("=")
        return Candidates(files="file", prefix=f"{name}=" if equals and name.startswith("-") else "")

    def _arguments(self) -> list[click.Argument]:
        return [parameter for parameter in self.command.params if isinstance(parameter, click.Argument)]

    def _option(self, name: str) -> click.Option | None:
        """Return the option of this name, if it takes a value."""
        option = next((each for each in self._options() if name in _names_of(each)), None)
        return None if option is None or option.is_flag or option.count else option

    def _options(self) -> list[click.Option]:
        return [each for each in self.command.get_params(self.context) if isinstance(each, click.Option)]

    def _option_names(self) -> Candidates:
        """Return the options, except those that were given; spellings with underscores only if one is being typed."""
        options = filter(self._can_be_given, self._options())
        words = [
            (name, _first_sentence(option.help or ""))
            for option in options
            for name in _names_of(option)
            if self._may_become(name)
        ]
        return Candidates(words=tuple(words))

    def _can_be_given(self, option: click.Option) -> bool:
        typed = {word.partition("=")[0] for word in self.words}
        return not option.hidden and (option.multiple or typed.isdisjoint(_names_of(option)))

    def _may_become(self, name: str) -> bool:
        return name.startswith(self.incomplete) and ("_" not in name or "_" in self.incomplete)

    def _subcommands(self, group: click.Group) -> Iterator[tuple[str, str]]:
        for item in group.shell_complete(self.context, self.incomplete):
            yield item.value, item.help or ""

    def _argument(self) -> Candidates:
        """Return values of the first argument that has none yet."""
        for argument in self._arguments():
            if argument.nargs == -1 or not self.context.params.get(str(argument.name)):
                return self._value(argument, self.incomplete)
        return Candidates()

    def _value(self, parameter: click.Parameter, typed: str, *, prefix: str = "") -> Candidates:
        items: list[CompletionItem[Any]] = parameter.shell_complete(self.context, typed)
        words = [(f"{prefix}{item.value}", item.help or "") for item in items if item.type not in _BY_SHELL]
        files = [item.type for item in items if item.type in _BY_SHELL]
        return Candidates(words=tuple(words), files=files[0] if files else "", prefix=prefix)


def _names_of(option: click.Option) -> tuple[str, ...]:
    """Return all spellings of an option, with those that switch it off."""
    return *option.opts, *option.secondary_opts


def _first_sentence(text: str) -> str:
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    return sentence if len(sentence) <= _LONGEST_HELP else f"{sentence[: _LONGEST_HELP - 3].rpartition(' ')[0]}..."
