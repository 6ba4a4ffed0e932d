"""`run` and `trace` for click: help and completion. The commands themselves parse the line, as torchrun does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click

from numapin.cli.options import FilePath, Parsed
from numapin.cli.output import emit
from numapin.launcher.options import TORCHRUN_OPTIONS, OptionGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numapin.launcher.options import TorchrunOption

_HELP_ALL: Final = "--help-all"
_HELP: Final = ("-h", "--help", _HELP_ALL)
_UNDERSCORED: Final = re.compile(r", --[a-z-]*_\w+")
EXIT_STATUSES: Final = (
    ("0", "all ranks succeeded"),
    ("1", "a rank failed"),
    ("2", "the command line is wrong"),
    ("3", "the machine cannot be read"),
    ("4", "no plan is feasible"),
    ("5", "--strict: a binding was refused, or is less than requested"),
    ("128 + n", "signal n ended the job: SIGTERM 143, SIGHUP 129, SIGQUIT 131; Ctrl-C: dies of SIGINT"),
)
_USUAL: Final = "Common options of torchrun"


class _TorchrunOption(click.Option):
    """An option of torchrun; help shows it with hyphens only."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names and the help, without the spelling with underscores."""
        record = super().get_help_record(ctx)
        return record and (_UNDERSCORED.sub("", record[0]), record[1])


def _click_option(option: TorchrunOption) -> click.Option:
    if not option.value:
        return _TorchrunOption([*option.spellings, option.key], is_flag=True, help=option.help)
    kind = FilePath() if option.is_file else Parsed("text", str, words=option.words)
    return _TorchrunOption([*option.spellings, option.key], type=kind, metavar=option.value, help=option.help)


class TorchrunCommand(click.Command):
    """A command that takes torchrun's command line with numapin's options in it.

    `callback` gets the words of the command line. `sections` are numapin's own options by their headings;
    `other_sections` those that the short help page leaves out, as it does torchrun's.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[[tuple[str, ...]], None],
        *,
        about: str,
        examples: str,
        sections: dict[str, list[click.Option]],
        other_sections: dict[str, list[click.Option]] | None = None,
    ) -> None:
        own = [option for options in (sections | (other_sections or {})).values() for option in options]
        source = "`numapin run`" if other_sections else "torchrun"
        help_all = f"Also show the other options of {source}. All of them work, and mean the same."
        self._torchruns = {option.names[-1]: _click_option(option) for option in TORCHRUN_OPTIONS}
        super().__init__(
            name,
            callback=callback,
            params=[
                *own,
                *self._torchruns.values(),
                click.Option([_HELP_ALL], is_flag=True, expose_value=False, help=help_all),
                click.Argument(["script"], type=FilePath()),
                click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
            ],
            help=f"{about}\n\n\b\nExamples:\n{examples}",
            context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        )
        self._sections, self._other_sections = sections, other_sections or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help if it is asked for; else leave the words to the callback. Completion needs them parsed."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        asked = self._asked_help(args)
        if asked:
            formatter = ctx.make_formatter()
            self.format_usage(ctx, formatter)
            self.format_help_text(ctx, formatter)
            for title, options in self.sections(ctx, shows_all=asked == _HELP_ALL).items():
                with formatter.section(title):
                    formatter.write_dl(list(records(options, ctx)))
            with formatter.section("Exit status"):
                formatter.write_dl(list(EXIT_STATUSES))
            emit(formatter.getvalue().rstrip("\n") + "\n")
            ctx.exit()
        ctx.params["arguments"] = tuple(args)
        return []

    def _asked_help(self, words: Iterable[str]) -> str:
        """Return the help option before the script, or ""."""
        spelled, left = self.options(), iter(words)
        for word in left:
            if word in _HELP or (len(word) > 2 and "--help".startswith(word)):  # may be cut short, as with torchrun
                return word
            if not word.startswith("-") or word in {"-", "--"}:
                return ""
            meant = [spelled[word]] if word in spelled else []
            if not meant and len(word) > 2:
                meant = [option for name, option in spelled.items() if name.startswith(word)]
            if meant and not any(option.is_flag for option in meant):  # an unknown option takes no value
                next(left, None)
        return ""

    def options(self) -> dict[str, click.Option]:
        """Return the options by each of their spellings."""
        found = (option for option in self.params if isinstance(option, click.Option))
        return {name: option for option in found for name in (*option.opts, *option.secondary_opts)}

    def sections(self, ctx: click.Context, *, shows_all: bool) -> dict[str, list[click.Option]]:
        """Return the options of the page by their headings."""

        def shown(options: Iterable[TorchrunOption]) -> list[click.Option]:
            return [self._torchruns[option.names[-1]] for option in options]

        page = {**self._sections}
        if shows_all:
            page |= self._other_sections
            for group in OptionGroup:
                page[group.value] = shown(option for option in TORCHRUN_OPTIONS if option.group is group)
        elif not self._other_sections:
            page[_USUAL] = shown(option for option in TORCHRUN_OPTIONS if option.is_usual)
        helps = filter(None, (self.get_help_option(ctx), self.options()[_HELP_ALL]))
        return {**page, "Help": list(helps)}


def records(options: Iterable[click.Parameter], ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the names and the help of the options that are not hidden."""
    for option in options:
        record = option.get_help_record(ctx)
        if record is not None:
            yield record
