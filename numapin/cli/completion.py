"""`numapin completion`: shell completion of numapin's command lines."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final

import click

from numapin.base.printable import printable
from numapin.cli.complete import complete
from numapin.cli.output import emit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.cli.complete import Candidates

_SHELLS: Final = ("bash", "zsh", "fish")
_QUOTES: Final = "\"'"
_UNSAFE: Final = re.compile(r"[^\w@%+=:,./~-]")
_ESCAPED: Final = r"\\\g<0>"


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
    kept = 0 if typed[-1][:1] in _QUOTES else _length_kept(words[-1], breaks)
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


def _length_kept(word: str, breaks: str) -> int:
    """Return the length of the part of a word that bash has completed already: "--bind=" of "--bind=ex"."""
    return max((word.rfind(char) + 1 for char in breaks if char not in _QUOTES), default=0)


def _position(words: Sequence[str], begin: int, typed: Sequence[str]) -> int:
    """Return the place, among bash's words, of the word at `begin`: the same one of equal words in both."""
    if begin == len(words) - 1:
        return len(typed) - 1
    same = [place for place, word in enumerate(typed) if split_line(word) == [words[begin]]]
    num_before = words[:begin].count(words[begin])
    return same[num_before] if num_before < len(same) else len(typed) - 1
