"""Expand lists of hosts as resource managers write them."""

from __future__ import annotations

import re
from itertools import product
from typing import Final

MAX_HOSTS: Final = 65_536
_NO_LIST: Final = f"is not a list of at most {MAX_HOSTS} hosts"
_ITEM: Final = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+")
_PART: Final = re.compile(r"([^\[\]]+)|\[([0-9,-]+)\]")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand(text: str) -> tuple[str, ...]:
    """Return the names in Slurm's notation, e.g. "gpu[01-03,7],login". Raises ValueError.

    As in `scontrol show hostnames`, a number has at least as many digits as the first of its range, and of several
    brackets the last changes fastest.
    """
    names: list[str] = []
    items = _items(text) if "[" in text or "]" in text else text.split(",")
    for item in items:
        choices: list[list[str]] = []
        num_names = 1
        for plain, ranges in _PART.findall(item):
            choices.append([plain] if plain else _numbers(ranges))
            num_names *= len(choices[-1])
            if len(names) + num_names > MAX_HOSTS:
                raise ValueError(_NO_LIST)
        if not item:
            raise ValueError(_NO_LIST)
        names += map("".join, product(*choices))
    return tuple(names)


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    items = _ITEM.findall(text)
    if ",".join(items) != text:
        raise ValueError("has brackets that do not match")
    return items


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ranges such as "01-03,7"."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if not match or int(last) < int(first):
            raise ValueError(f"has a malformed range: {part}")
        if len(numbers) + int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(_NO_LIST)
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers
