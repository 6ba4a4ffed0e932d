"""Every field of each command's JSON is in docs/schemas.md with its type, and the page has no other fields."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from numapin.errors import Stopped
from tests.docs import seam
from tests.recorded.failures import ended
from tests.trace.made import loop
from tests.unit.compare.made import failed, report_of
from tests.unit.view.test_fits import DONE, PROCESS, RANK

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "machines" / "golden" / "2pkg-8node-smt2-8gpu-pairs.json"
PAGE = (ROOT / "docs" / "schemas.md").read_text()
SCHEMAS = dict(re.findall(r"^## (numapin\.\w+/\d+)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
OBJECTS = PAGE.partition("## Objects in several schemas")[2]
ROW = re.compile(r"^\| (?P<fields>`[^|]+) \| [^|]+ \|$", re.MULTILINE)
FIELD = re.compile(
    r"`(?P<name>[^`]+)`|(?:\[(?P<object>\w+)\]\(#objects-in-several-schemas\)|(?P<type>\w+))(?P<or_null>\??)"
)

# Objects whose keys are data, with the page's name for the keys; and objects that are described elsewhere.
KEYED = {
    "variables": "name",
    "distances": "node",
    "bytes_by_node": "node",
    "before": "node",
    "after": "node",
    "stays": "reason",
    "figures": "figure",
    "parts": "part",
}
OPAQUE = {"requested", "settings", "versions", "details[]"}
TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "list": (str,),
    "int": (int,),
    "num": (int, float),
    "bool": (bool,),
    "obj": (dict,),
    "arr": (list,),
    "strs": (list, tuple),
    "nums": (list, tuple),
    "null": (),
}


def documented(table: str) -> dict[str, str]:
    """Return path -> type from a table, and of each object around a field.

    A row has fields of one object, with their types after them. A field may be an object that has rows of its own.
    """
    found = {"schema": "str"}
    for row in ROW.finditer(table):
        names: list[str] = []
        parent = None
        for field in FIELD.finditer(row["fields"]):
            if field["name"]:
                names.append(f"{parent}.{field['name']}" if parent else field["name"])
                parent = field["name"].rpartition(".")[0] if parent is None else parent
                continue
            for name in names:
                found[name] = f"{field['type'] or 'obj'}{field['or_null']}"
                if field["object"]:
                    rows = re.sub(rf"^\| `{field['object']}\.", f"| `{name}.", OBJECTS, flags=re.MULTILINE)
                    inner = documented("\n".join(line for line in rows.splitlines() if line.startswith(f"| `{name}.")))
                    found |= {path: kind for path, kind in inner.items() if path.startswith(f"{name}.")}
            names = []
    # The objects that a field is in need no row of their own.
    around = {path[: dot.start()] for path in found for dot in re.finditer(r"\.", path)}
    return dict.fromkeys(around, "obj") | found


def flattened(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each path of a decoded document with a value at that path."""
    if path:
        yield path, value
    name = path.rpartition(".")[2]
    if name in OPAQUE:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            shown = f"{{{KEYED[name]}}}" if name in KEYED else key
            yield from flattened(item, f"{path}.{shown}" if path else shown)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flattened(item, f"{path}[]")


def output(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(seam.numapin, list(arguments))
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Return documents of every schema, from commands or from the functions behind them."""
    machine = json.loads(GOLDEN.read_text())["topology"]  # with the fields that it lacks
    machine["gpus"][0]["mig"] = [{"uuid": "MIG-1", "name": None}]
    machine["notes"] = ["a note"]
    machine["speeds"] = [{"cpus": "0", "highest_perf": 255, "capacity": 1024}]
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    path.write_text(json.dumps(machine))
    of_file = ("--json", "--machine", str(path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid = str(process.pid)
        observed = [output("verify", "--json", "--pid", pid), output("top", "--once", "--json", "--pid", pid)]
        process.kill()
    applied = seam.Applied(cpus=frozenset({0}), memory=None, nodes=frozenset(), shortfalls=("refused",)).to_json()
    report = observed[0] | {"ranks": [observed[0]["ranks"][0] | {"applied": applied}]}
    nccl = seam.NcclLibrary(library="/lib/libnccl.so.2", version="2.29.7", ignores_affinity=False).to_json()
    report["ranks"].append({"observed": {"processes": [{"nccl": nccl}]}})
    traced = seam.read_trace(loop(copy=300, memory="Pageable").content(), source="x")
    return {
        "numapin.topology/1": [output("topo", "--json"), output("topo", *of_file)],
        "numapin.plan/1": [output("plan", "--json"), output("plan", *of_file)],
        "numapin.report/1": [observed[0], report | {"launcher": {"name": "direct", "reason": "one host"}}, _failed()],
        "numapin.top/1": [observed[1]],
        "numapin.attach/1": [_attached()],
        "numapin.doctor/1": [output("doctor", "--json")],
        "numapin.bench/1": [_measured()],
        "numapin.compare/1": [_compared()],
        "numapin.trace/1": [seam.make_report([seam.analyze(traced)], notes=["a note"]).to_json()],
    }


def _attached() -> object:
    """Return the report on a process whose pages were moved, and on one of which the kernel reports none."""
    rank = replace(RANK, processes=(PROCESS, replace(PROCESS, pages=None)))
    return replace(DONE, warnings=("w",), ranks=(rank,)).to_json()


def _failed() -> object:
    """Return the fields of a job that failed, and of one that was stopped."""
    ranks = ended(0, -9, gpu=0, node=0), ended(1, text="x", was_ended=True, logs=("l",))
    failure = seam.JobFailure(program="train.py", host="node7", ranks=ranks)
    return {**seam.outcome_of(seam.RanksFailed(failure)), **seam.outcome_of(Stopped(signal.SIGTERM))}


def _compared() -> object:
    made = report_of({"torchrun-threads": [0.2, 0.3, 0.1], "numapin": [0.1, 0.2, 0.3]}, failed("torchrun", "why"))
    machine = _measured()["machine"]
    variant = made.variants[1]
    ratio, to_threads = (
        found and replace(found, doubt="why", num_rounds_needed=9)
        for found in (variant.ratio, variant.ratio_to_threads)
    )
    noted = replace(variant, notes=("a note",), ratio=ratio, ratio_to_threads=to_threads)
    return replace(made, machine=machine, notes=("a note",), variants=(*made.variants, noted)).to_json()


def _measured() -> dict[str, Any]:
    case = seam.Case(name="a", about="b", peers=(seam.Peer(name="p", specs=()),))
    benchmark = seam.Benchmark(name="x", module="y", cases=(case,))
    runs = [seam.Run(case="a", peer="p", repeat=0, figures={"s": 1.0}, details=({"k": 1},))]
    given: dict[str, Any] = {"num_cpus": 1, "memory_bytes": 1, "kernel": "6", "python": "3", "versions": {}}
    unknown: dict[str, Any] = dict.fromkeys(("cpu", "cuda", "driver", "no_gpu"))
    machine = seam.BenchMachine(gpus=("g",), **given, **unknown)
    report = seam.BenchReport(
        benchmark="x",
        command=("c",),
        machine=machine.to_json(),
        settings={},
        cases=seam.summarize(benchmark, runs),
        verdict=seam.BenchVerdict(answer=seam.BenchAnswer.SAME, text="pin: no difference"),
    )
    return report.to_json()


def test_every_schema_is_documented(documents: dict[str, list[object]]) -> None:
    """The page has a non-empty table for each schema."""
    assert SCHEMAS.keys() == documents.keys()
    assert all(ROW.search(table) for table in SCHEMAS.values())


@pytest.mark.parametrize("schema", list(SCHEMAS))
def test_fields_and_types(schema: str, documents: dict[str, list[object]]) -> None:
    """Each printed field is documented with its type, and each documented field is printed."""
    types = documented(SCHEMAS[schema])
    seen: set[str] = set()
    for path, value in (pair for document in documents[schema] for pair in flattened(document)):
        if path not in types and f"{path}[]" in types:
            assert isinstance(value, list | tuple), path
            continue
        array = types.get(path.removesuffix("[]"), "")
        if path.endswith("[]") and array.startswith(("strs", "nums")):
            assert isinstance(value, str if array.startswith("strs") else int | float), path
            continue
        assert path in types, f"{path} is not in docs/schemas.md"
        seen.add(path)
        kind = types[path].rstrip("?")
        is_right = types[path] in (f"{kind}?", "null") if value is None else isinstance(value, TYPES[kind])
        assert is_right, f"{path}: {value!r} is no {types[path]}"
        assert not isinstance(value, bool) or kind == "bool", path
    unseen = {path for path in types if path not in seen and not path.endswith("[]")}
    # This machine cannot print a GPU's.
    absent = {"ranks[].gpu.index", "ranks[].gpu.uuid", "ranks[].gpu.pci"} if schema == "numapin.top/1" else set()
    assert unseen <= absent
