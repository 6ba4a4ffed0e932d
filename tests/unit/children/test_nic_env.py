"""The variables of --nic-env when the GPU of a process becomes known, or turns out to be another one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.children import nic_env
from numapin.children.nic_env import replace_nics
from numapin.plan import nics
from numapin.plan.request import NicLibrary
from numapin.rank.become import BINDING
from tests.unit.children.below import Gpus, run
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from pathlib import Path

UCX, PAIRS, LIST = "UCX_NET_DEVICES", "NVSHMEM_ENABLE_NIC_PE_MAPPING", "NVSHMEM_HCA_LIST"
OURS = {UCX: "mlx5_0:1", PAIRS: "1", LIST: "mlx5_0:1"}
NEW = {UCX: "mlx5_1:1", PAIRS: "1", LIST: "mlx5_1:1"}


def _exported(number: int) -> dict[str, str]:
    libraries = (NicLibrary.UCX, NicLibrary.NVSHMEM)
    return nics.exported(replace(PLANNED, nics=(f"mlx5_{number}", "mlx5_9"), nics_reason="", nic_env=libraries))


def _replaced(changes: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    """Return the variables in a process that had GPU 0, and has changed some of them."""
    environ = {**_exported(0), **changes, BINDING: json.dumps({"nics": ["mlx5_0", "mlx5_9"]})}
    replace_nics(wanted, environ)
    del environ[BINDING]
    return environ


def test_the_name_and_the_values_are_those_of_the_plan() -> None:
    """This module does not import the plan's, which costs more, and knows what it writes."""
    assert nic_env.NAMES == nics._OURS
    assert _exported(0) == {**OURS, nic_env.NAMES: ":".join(OURS)}
    assert set(OURS.values()) == {*(nic_env._values({BINDING: json.dumps({"nics": ["mlx5_0"]})}) or ())}


@pytest.mark.parametrize("wanted", [NEW, {}])
def test_the_values_of_the_gpu_before_go(wanted: dict[str, str]) -> None:
    """Those of the new GPU replace them; if it has none, nothing stays."""
    names = {nic_env.NAMES: ":".join(wanted)} if wanted else {}
    assert _replaced({}, {**wanted, **names}) == {**wanted, **names}


@pytest.mark.parametrize(
    ("changes", "names"),
    [({UCX: "mlx5_7:1"}, (PAIRS, LIST)), ({LIST: "mlx5_7:1"}, (UCX,)), ({UCX: "all", LIST: "mlx5_7:1"}, ())],
)
def test_what_the_program_has_set_stays(changes: dict[str, str], names: tuple[str, ...]) -> None:
    """The library gets none of our values, and NUMAPIN_NIC_ENV does not name its variables."""
    ours = {nic_env.NAMES: ":".join(names)} if names else {}
    assert _replaced(changes, _exported(1)) == {**changes, **{name: NEW[name] for name in names}, **ours}
    assert _replaced(changes, {}) == changes


@pytest.mark.parametrize("binding", ["{", "{}", '{"nics": null}', '{"nics": []}', "[]", None])
def test_an_outer_run(binding: str | None) -> None:
    """Where the values of an outer run are unknown, NUMAPIN_NIC_ENV says which variables are its own."""
    environ = {**_exported(0), **({} if binding is None else {BINDING: binding})}
    replace_nics(_exported(1), environ)
    assert {name: environ[name] for name in NEW} == NEW


@pytest.mark.parametrize(
    ("line", "value"), [("", "mlx5_1:1 UCX_NET_DEVICES"), ("os.environ['UCX_NET_DEVICES'] = 'all'", "all -")]
)
def test_a_wrong_guess(line: str, value: str, tmp_path: Path) -> None:
    """The process has the first GPU's NIC until it takes the second; what it has set itself stays."""
    text = f"""
show = lambda: print(os.environ["UCX_NET_DEVICES"], os.environ.get("NUMAPIN_NIC_ENV", "-"))
show()
{line}
torch.cuda.set_device(1)
show()
"""
    ran = run(tmp_path, text, gpus=Gpus(nic_env=(NicLibrary.UCX,)), LOCAL_RANK="0")
    assert ran.lines == ["mlx5_0:1 UCX_NET_DEVICES", value], ran.err
