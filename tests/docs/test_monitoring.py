"""The files for a host's monitoring name metrics, labels and options that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from typing import TYPE_CHECKING, Final

from prometheus_client.openmetrics import parser

from tests.docs.pages import DOCS, ROOT
from tests.docs.seam import JobOrigin, openmetrics
from tests.docs.test_pages import check_command_line
from tests.unit.watched import job, rank

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_FOLDER: Final = ROOT / "examples" / "monitoring"
_ORIGIN: Final = JobOrigin(host="node7", user="alice", job_id="4711", pod="train-0", namespace="ml", ranks={0: 8})
_OF_PROMETHEUS: Final = {"instance", "job"}


def _families() -> list[Metric]:
    return [*parser.text_string_to_metric_families(openmetrics([(job(rank()), _ORIGIN)], num_unread=0))]


_DASHBOARD: Final = json.loads((_FOLDER / "grafana.json").read_text())


def test_the_dashboards_metrics_are_written() -> None:
    """Each name in a query is that of a sample, and each label one that a sample of the panel's metrics has."""
    labels_of = {sample.name: {*sample.labels} for family in _families() for sample in family.samples}
    for panel in _DASHBOARD["panels"]:
        queries = " ".join(target["expr"] for target in panel["targets"])
        names = re.findall(r"numapin_\w+", queries)
        assert names, panel["title"]
        assert {*names} <= labels_of.keys(), panel["title"]
        known = set.intersection(*(labels_of[name] for name in names)) | _OF_PROMETHEUS
        used = re.findall(r"(\w+)=~?\"", queries)
        used += [word for words in re.findall(r"\bby \(([^)]*)\)", queries) for word in words.split(", ")]
        used += [word for target in panel["targets"] for word in re.findall(r"{{(\w+)}}", target["legendFormat"])]
        assert {*used} <= known, panel["title"]


def test_the_dashboards_variables() -> None:
    """Each variable that a query uses is defined, by a label that is written."""
    variables = {each["name"]: each for each in _DASHBOARD["templating"]["list"]}
    targets = json.dumps([panel["targets"] for panel in _DASHBOARD["panels"]])
    used = {*re.findall(r"\$(\w+)", targets)} - {"__rate_interval"}
    assert used == variables.keys() - {"datasource"}
    samples = [sample for family in _families() for sample in family.samples]
    queries = {f"label_values({sample.name}, {label})" for sample in samples for label in sample.labels}
    assert {variables[name]["query"]["query"] for name in used} <= queries


def test_the_page_has_all_labels() -> None:
    """The table of docs/guides/metrics.md has each label that a metric may have."""
    page = (DOCS / "guides" / "metrics.md").read_text()
    described = {
        label for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for label in re.findall(r"`(\w+)`", row)
    }
    assert described == {label for family in _families() for label in family.samples[0].labels}


_UNIT: Final = _FOLDER / "numapin-metrics.service"


def test_the_command_of_the_service() -> None:
    """It is one that numapin accepts, for a file that the collector reads."""
    unit = configparser.ConfigParser()
    unit.read_string(_UNIT.read_text())
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/bin/numapin")
    check_command_line(words)
    assert words[words.index("--openmetrics") + 1].endswith(".prom")
    assert unit["Service"]["SuccessExitStatus"] == str(128 + 15)
