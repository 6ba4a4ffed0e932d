"""The public API is documented in Google's form, and names in examples exist."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

import pytest

import numapin
from numapin import pinned
from tests.docs.pages import DOCS, PAGES, name_of
from tests.docs.seam import Stats

PUBLIC: tuple[Any, ...] = (
    *(getattr(numapin, name) for name in numapin.__all__ if name != "pinned"),
    *(pinned.empty, pinned.pin, pinned.where, pinned.budget, pinned.serve_torch, pinned.trim, pinned.Budget, Stats),
    *(numapin.Topology.from_json, numapin.Topology.find_gpu, numapin.Node.distance_to),
    *(numapin.Plan.from_json, numapin.Plan.require_exact, numapin.RankPlan.require_exact),
)


def entries(thing: Any, title: str) -> list[str]:
    docstring = inspect.cleandoc(thing.__doc__ or "")
    section = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    return re.findall(r"^    (\w+): ", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__qualname__)
def test_arguments_and_fields_are_described(thing: Any) -> None:
    """Each parameter of a function or the loader, and each field of a record, is described, in order."""
    if dataclasses.is_dataclass(thing):
        assert entries(thing, "Attributes") == [field.name for field in dataclasses.fields(thing)]
    elif inspect.isroutine(thing) or thing is numapin.DataLoader:
        parameters = [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]
        assert entries(thing, "Args") == parameters
        assert "Example:" in (thing.__doc__ or "") or "." in thing.__qualname__  # methods need none


def test_every_public_name_is_in_the_reference() -> None:
    """The API pages list each public name."""
    page = (DOCS / "api.md").read_text()
    missing = [name for name in numapin.__all__ if not re.search(rf"^::: numapin\.{name}$", page, re.MULTILINE)]
    assert missing == []


def examples() -> list[tuple[str, str]]:
    """Return each block of Python in the pages and docstrings, with its location."""
    texts = [(name_of(path), path.read_text()) for path in PAGES]
    texts += [(thing.__qualname__, inspect.cleandoc(thing.__doc__ or "")) for thing in PUBLIC]
    fence = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    return [(where, textwrap.dedent(match[2])) for where, text in texts for match in fence.finditer(text)]


@pytest.mark.parametrize(("where", "code"), examples())
def test_examples_are_python_with_names_that_exist(where: str, code: str) -> None:
    """Each example can be parsed, and the names that it uses from numapin exist."""
    for node in ast.walk(ast.parse(code, filename=where)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"numapin": numapin, "pinned": pinned}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), f"{where}: {node.value.id}.{node.attr}"


def test_the_example_of_the_api_page_runs() -> None:
    """The first example runs as it is written."""
    code = re.findall(r"^```python\n(.*?)^```", (DOCS / "api.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    found: dict[str, Any] = {}
    exec(code.replace("EXCLUSIVE", "NODE"), found)  # noqa: S102 - our own page; this machine may have one core
    assert found["plan"].ranks
