"""The public API is documented in Google's form, and names in examples exist."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import numapin
from numapin import errors, pinned
from tests.docs.pages import DOCS, PAGES, name_of
from tests.docs.seam import Stats

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(numapin.discover, numapin.make_plan, numapin.spawn, numapin.bind_this_process, numapin.share, numapin.pack_bytes),
    *(pinned.empty, pinned.pin, pinned.where, pinned.budget, pinned.serve_torch, pinned.trim),
)
RAISE_NOTHING = {pinned.serve_torch, pinned.trim}
RECORDS = (
    *(numapin.Topology, numapin.Package, numapin.Node, numapin.Core, numapin.Gpu, numapin.Nic, numapin.Link),
    *(numapin.Allowed, numapin.Request, numapin.Plan, numapin.RankPlan, pinned.Budget, Stats),
    numapin.ProcessBinding,
)
METHODS = (
    *(numapin.Topology.from_json, numapin.Topology.find_gpu, numapin.Node.distance_to),
    *(numapin.Plan.from_json, numapin.Plan.require_exact, numapin.RankPlan.require_exact),
)


def section(docstring: str | None, title: str) -> str:
    match = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    return match[1] if match else ""


def entries(docstring: str | None, title: str) -> list[str]:
    return re.findall(r"^    (\w+): ", section(docstring, title), re.MULTILINE)


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda function: function.__qualname__)
def test_functions_describe_arguments_result_and_errors(function: Callable[..., Any]) -> None:
    """Each parameter is described, in order; so is the result, if there is one, and errors, which exist.

    Each public function lists the errors that it raises, if any, and has an example.
    """
    docstring = function.__doc__
    assert entries(docstring, "Args") == parameters(function)
    is_procedure = inspect.signature(function).return_annotation in ("None", None)
    assert is_procedure or section(docstring, "Returns")
    raised = entries(docstring, "Raises")
    assert {*raised} <= {*vars(errors), "TypeError"}
    if function in FUNCTIONS:
        assert bool(raised) == (function not in RAISE_NOTHING)
        assert section(docstring, "Example")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_describe_their_fields(record: type) -> None:
    """Each field of a public record is described, in order."""
    assert entries(record.__doc__, "Attributes") == [field.name for field in dataclasses.fields(record)]


def test_dataloader_describes_its_arguments() -> None:
    """Each argument of the loader is described, including torch's."""
    assert entries(numapin.DataLoader.__doc__, "Args") == parameters(numapin.DataLoader.__init__)
    assert section(numapin.DataLoader.__doc__, "Raises")
    assert section(numapin.DataLoader.__doc__, "Example")


def test_every_public_name_is_in_the_reference() -> None:
    """The API pages list each public name."""
    page = (DOCS / "api.md").read_text()
    missing = [name for name in numapin.__all__ if not re.search(rf"^::: numapin\.{name}$", page, re.MULTILINE)]
    assert missing == []


def examples() -> list[tuple[str, str]]:
    """Return each block of Python in the pages and docstrings, with its location."""
    documented: list[Any] = [*FUNCTIONS, *METHODS, *RECORDS, numapin.DataLoader, numapin.NumapinError]
    texts = [(name_of(path), path.read_text()) for path in PAGES]
    texts += [(thing.__qualname__, inspect.cleandoc(thing.__doc__ or "")) for thing in documented]
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
