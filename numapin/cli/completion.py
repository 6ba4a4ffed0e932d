"""`numapin completion`: shell completion of numapin's command lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from numapin.base.text import printable
from numapin.cli.output import emit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from click.shell_completion import CompletionItem

_SHELLS: Final = ("bash", "zsh", "fish")
_QUOTES: Final = "\"'"
_UNSAFE: Final = re.compile(r"[^\w@%+=:,./~-]")
_ESCAPED: Final = r"\\\g<0>"
_LONGEST_HELP: Final = 70
_SENTENCE_END: Final = re.compile(r"(?<!e\.g)\.(?: |$)|;")
_BY_SHELL: Final = ("file", "dir")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes numapin's command lines in a shell.

    It completes commands, options and their values, torchrun's options, files, the names of active runs, and the
    command line after `exec --`. To load the script in every new shell, add a line to its start-up file:

    \b
      bash  ~/.bashrc                    eval "$(numapin completion bash)"
      zsh   ~/.zshrc, below compinit     eval "$(numapin completion zsh)"
      fish  ~/.config/fish/config.fish   numapin completion fish | source

    Or write it to a file, which the shell reads at the first key press after `numapin`:

    \b
      numapin completion bash > ~/.local/share/bash-completion/completions/numapin
      numapin completion zsh > "${fpath[1]}/_numapin"
      numapin completion fish > ~/.config/fish/completions/numapin.fish
    """
    from importlib.resources import files  # takes 10 ms, which a key press need not wait for

    emit(files("numapin.cli").joinpath("shells", f"completion.{shell}").read_text(encoding="utf-8"))


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, hidden=True)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def complete_line(shell: str, words: tuple[str, ...]) -> None:
    """Print the candidates for the last of the words. The shells' scripts call this."""
    from numapin.cli.main import numapin

    if shell == "bash":
        line, breaks, *typed = words
        lines = _bash_lines(line, breaks, typed)
    else:
        lines = _lines(complete(numapin, words))
    emit("".join(f"{line}\n" for line in lines))


def _lines(found: Candidates) -> Iterator[str]:
    """Yield the lines of candidates, with whole words, as zsh and fish take them."""
    if found.command_at is not None:
        yield f"command\t{found.command_at + 1}"
    for word, description in found.words:
        yield f"word\t{printable(word)}\t{printable(description)}"
    if found.files:
        yield f"{found.files}\t{found.prefix}"


def _bash_lines(line: str, breaks: str, typed: Sequence[str]) -> Iterator[str]:
    """Yield the lines of candidates for bash, which replaces only what follows the last of its `breaks` in a word.

    `line` is the command line before the cursor, and `typed` the same as bash splits it.
    """
    from numapin.cli.main import numapin

    words = split_line(line)
    found = complete(numapin, words[1:])
    if found.command_at is not None:
        yield f"command\t{_position(words, found.command_at + 1, typed)}"
    # What bash has completed already: "--bind=" of "--bind=ex".
    ends = [words[-1].rfind(char) + 1 for char in breaks if char not in _QUOTES]
    kept = 0 if typed[-1][:1] in _QUOTES else max(ends, default=0)
    for word, _ in found.words:
        yield f"word\t{_UNSAFE.sub(_ESCAPED, printable(word[kept:]))}"
    if found.files == "file" and not found.words:
        yield "default\t"  # readline's own completion of names knows quotes and ~
    elif found.files:
        yield f"{found.files}\t{words[-1][kept:]}"


def split_line(line: str) -> list[str]:
    """Split a command line that may end within quotes; its last word is "" after a blank."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # an open quote: the word so far is here
        return [*words, lexer.token]
    return [*words, ""] if line[-1:].isspace() else words


def _position(words: Sequence[str], begin: int, typed: Sequence[str]) -> int:
    """Return the place, among bash's words, of the word at `begin`: the same one of equal words in both."""
    if begin == len(words) - 1:
        return len(typed) - 1
    same = [place for place, word in enumerate(typed) if split_line(word) == [words[begin]]]
    num_before = words[:begin].count(words[begin])
    return same[num_before] if num_before < len(same) else len(typed) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates at the cursor."""

    words: tuple[tuple[str, str], ...] = ()  # whole words, each with a description or ""
    files: str = ""  # "file" or "dir", if such names are valid, too
    prefix: str = ""  # the start of the word that precedes a value: "--output="
    command_at: int | None = None  # the number of the word that begins another program's command line


def complete(group: click.Group, words: Sequence[str]) -> Candidates:
    """Return the candidates for the last of the words, which follow the program's name."""
    *before, incomplete = words or [""]
    command: click.Command = group
    path, rest = [group.name or ""], list(before)
    while isinstance(command, click.Group) and rest:
        name = rest.pop(0)
        found = None if name.startswith("-") else command.get_command(click.Context(command), name)
        if found is not None:
            command = found
            path.append(name)
    context = command.make_context(" ".join(path), list(rest), resilient_parsing=True)
    with context:
        return _candidates(context, rest, incomplete, begin=len(before) - len(rest))


def _candidates(context: click.Context, words: Sequence[str], incomplete: str, *, begin: int) -> Candidates:
    """Return the candidates for the incomplete word after the words of one command; `begin` words precede them."""
    command, last = context.command, words[-1] if words else ""
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    valued = {name: each for each in options if not (each.is_flag or each.count) for name in _names_of(each)}
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    given = [context.params.get(str(argument.name)) for argument in arguments]
    # Another program's command line can end this one: `exec -- CMD`, `run SCRIPT`.
    takes_tail = bool(arguments) and not context.allow_interspersed_args
    tail = [word for value in given if value is not None for word in (value if isinstance(value, tuple) else (value,))]
    name, equals, value = incomplete.partition("=")
    is_option = incomplete.startswith("-")
    option, typed, prefix = valued.get(last), incomplete, ""
    if is_option:
        option, typed, prefix = valued.get(name) if equals else None, value, f"{name}="
    is_in_tail = takes_tail and (tail or last == "--")
    if option is not None and not is_in_tail:
        return _values(context, option, typed, prefix=prefix)
    if is_option and not is_in_tail:
        return _option_names(options, words, incomplete)
    if takes_tail:  # the shell completes the other program's words; a script's are files, as far as numapin can know
        if command.name == "exec" or context.params.get("no_python"):
            return Candidates(command_at=begin + len(words) - len(tail))
        return Candidates(files="file", prefix=f"{name}=" if equals and name.startswith("-") else "")
    if isinstance(command, click.Group):
        items = command.shell_complete(context, incomplete)
        return Candidates(words=tuple((item.value, item.help or "") for item in items))
    without_value = (each for each, got in zip(arguments, given, strict=True) if each.nargs == -1 or not got)
    argument = next(without_value, None)
    return Candidates() if argument is None else _values(context, argument, incomplete)


def _option_names(options: Sequence[click.Option], words: Sequence[str], incomplete: str) -> Candidates:
    """Return the options, except those that were given; spellings with underscores only if one is being typed."""
    typed, found = {word.partition("=")[0] for word in words}, []
    for option in options:
        names = _names_of(option)
        if option.hidden or (not option.multiple and not typed.isdisjoint(names)):
            continue
        sentence = _SENTENCE_END.split(option.help or "", maxsplit=1)[0]
        if len(sentence) > _LONGEST_HELP:
            sentence = f"{sentence[: _LONGEST_HELP - 3].rpartition(' ')[0]}..."
        begun = [name for name in names if name.startswith(incomplete) and ("_" not in name or "_" in incomplete)]
        found += [(name, sentence) for name in begun]
    return Candidates(words=tuple(found))


def _names_of(option: click.Option) -> tuple[str, ...]:
    """Return all spellings of an option, with those that switch it off."""
    return *option.opts, *option.secondary_opts


def _values(context: click.Context, parameter: click.Parameter, typed: str, *, prefix: str = "") -> Candidates:
    items: list[CompletionItem[Any]] = parameter.shell_complete(context, typed)
    words = [(f"{prefix}{item.value}", item.help or "") for item in items if item.type not in _BY_SHELL]
    files = [item.type for item in items if item.type in _BY_SHELL]
    return Candidates(words=tuple(words), files=files[0] if files else "", prefix=prefix)
