"""`numapin topo --format svg|html`, `--plan` and `--output`, as users type them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.integration.launching import call, forked, numapin, script
from tests.machines.roots import load, write_root
from tests.pictures import golden_machine


@pytest.fixture
def dgx(tmp_path: Path) -> str:
    """Give a machine file of a DGX A100, which has pairs of GPUs on nodes 3, 1, 7 and 5 of 8."""
    path = tmp_path / "dgx.json"
    path.write_text(json.dumps(golden_machine("2pkg-8node-smt2-8gpu-pairs").to_json()))
    return str(path)


def test_svg_to_stdout_and_html_to_a_file(dgx: str, tmp_path: Path) -> None:
    """A pipe gets only the SVG, a file the complete page, and stderr the warnings."""
    drawn = forked("topo", "--machine", dgx, "--format", "svg", "--plan")
    assert drawn.status == 0
    ET.fromstring(drawn.out)  # noqa: S314 - ours
    assert "rank 7" in drawn.out
    assert "128 CPUs of nodes 0,2,4,6" in drawn.err
    path = tmp_path / "topo.html"
    written = forked("topo", "--machine", dgx, "--format", "html", "--output", str(path))
    assert (written.status, written.out) == (0, "")
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.endswith("</html>\n")
    assert "rank 0" not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dgx.json", "topo.html"]


def test_a_device_or_link_stays_what_it_is(dgx: str, tmp_path: Path) -> None:
    """--output writes into a device or pipe, and does not replace it."""
    link, target, device = tmp_path / "link.svg", tmp_path / "target.svg", Path("/dev/null")
    link.symlink_to(target)
    for path in (link, device):
        assert forked("topo", "--machine", dgx, "--format", "svg", "--output", str(path)).status == 0
    assert (link.is_symlink(), target.read_text()[:4], device.is_char_device()) == (True, "<?xm", True)


@pytest.mark.parametrize(
    ("command", "second"), [(["plan", "--format", "env"], "LOCAL_RANK=1"), (["topo", "--plan"], "gpu1  rank 1")]
)
def test_gpus_that_no_driver_tells_of(command: list[str], second: str, tmp_path: Path) -> None:
    """A container sees GPUs in sysfs that it may not use, so it gets one rank; a captured machine gets one per GPU."""
    root = write_root(load("2pkg-2node-smt2-2gpu-node0"), tmp_path / "root")
    shutil.rmtree(root / "proc/driver")
    code = (
        "import pathlib; from numapin.cli.main import numapin; from numapin.topology import discover as reader\n"
        f"reader._read_host = lambda environ: reader.discover(root=pathlib.Path({str(root)!r}))\n"
        f"numapin({command!r})"
    )
    here, captured = call(sys.executable, "-c", code), forked(*command, "--root", str(root))
    assert (here.status, captured.status) == (0, 0), here.err + captured.err
    assert (second in captured.out, second in here.out, second.replace("1", "0") in here.out) == (True, False, True)


def test_the_plan_of_a_run(tmp_path: Path) -> None:
    """The plan.json of a run's folder is shown on the run's machine."""
    ran = numapin(
        *("run", "--nproc-per-node", "2", script(tmp_path, "print('ran')")), NUMAPIN_RUN_DIR=str(tmp_path / "runs")
    )
    assert ran.status == 0, ran.err
    (plan,) = (tmp_path / "runs").glob("run-*/plan.json")
    done = forked("topo", "--plan", str(plan))
    assert (done.status, "ranks 0-1" in done.out) == (0, True), done.err


def _browser(tmp_path: Path) -> tuple[str, Path]:
    """Return a command for BROWSER that keeps what it was given to show, and the file with that."""
    seen, program = tmp_path / "seen", tmp_path / "browser"
    program.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}\n')
    program.chmod(0o755)
    return f"{program} %s", seen


@pytest.mark.parametrize(("options", "start"), [([], "<!DOCTYPE html>"), (["--format", "svg", "--plan"], "<?xml")])
def test_open(options: list[str], start: str, dgx: str, tmp_path: Path) -> None:
    """--open shows the page, or the SVG, in the browser, from a file that only this user can read; stdout names it."""
    browser, seen = _browser(tmp_path)
    done = forked("topo", "--open", "--machine", dgx, *options, BROWSER=browser, TMPDIR=str(tmp_path))
    assert (done.status, done.err.count("error")) == (0, 0), done.err
    path = Path(done.out.strip())
    assert seen.read_text() == path.as_uri()
    assert path.read_text().startswith(start)
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_open_a_named_file(dgx: str, tmp_path: Path) -> None:
    """With --output the browser shows that file."""
    browser, seen = _browser(tmp_path)
    path = tmp_path / "a name.html"
    assert forked("topo", "--open", "--machine", dgx, "--output", str(path), BROWSER=browser).status == 0
    assert seen.read_text() == path.as_uri()
    assert path.read_text().endswith("</html>\n")


def test_open_without_a_browser(dgx: str, tmp_path: Path) -> None:
    """Without a browser the page is written, and the error names it."""
    done = forked("topo", "--open", "--machine", dgx, BROWSER="false %s", TMPDIR=str(tmp_path), PATH="/nowhere")
    assert done.status == 1
    assert f"no browser to open {done.out.strip()}" in done.err
    assert Path(done.out.strip()).exists()
