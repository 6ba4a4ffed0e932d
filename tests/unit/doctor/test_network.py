"""Checks of NICs on whole machines, and of the variables that name NICs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from numapin import Link, Nic, Topology
from tests.doctor.given import live
from tests.machines.grids import grid
from tests.machines.roots import HERE
from tests.unit.doctor.seam import DoctorSeverity, Host, NicKind, Tree, examine
from tests.unit.doctor.seam import live as reading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.unit.doctor.seam import DoctorFinding

WARNING, NOTE, OK = DoctorSeverity.WARNING, DoctorSeverity.NOTE, DoctorSeverity.OK


@cache
def _machine(name: str) -> Topology:
    return Topology.from_json(json.dumps(json.loads((HERE / "golden" / f"{name}.json").read_text())["topology"]))


def _find(check: str, topology: Topology, environ: Mapping[str, str] | None = None) -> DoctorFinding:
    host = Host(tree=Tree("/nonexistent"), topology=topology, live=live(environ=environ or {}))
    (finding,) = (found for found in examine(host) if found.check == check)
    assert (finding.remedy is not None) == (finding.severity in (WARNING, NOTE))
    return finding


class TestSharing:
    """GPUs that take the same NIC if each chooses alone."""

    def test_equally_near_nics(self) -> None:
        """Two GPUs of each switch would take its first NIC; the three others are idle, and --nic-env deals them out."""
        finding = _find("nic-sharing", _machine("2pkg-2node-8gpu-16nic"))
        assert finding.severity is NOTE
        assert finding.what.startswith(
            "gpu0-1 share mlx5_0 if each takes the first near one, while mlx5_1, mlx5_2, mlx5_3 are idle; gpu2-3 share"
        )
        assert finding.remedy == "numapin run --nic-env ucx,nvshmem … (deals the NICs out)"

    def test_a_nic_that_has_to_be_shared(self) -> None:
        """Two GPUs with one near NIC are no finding; those with two are."""
        what = _find("nic-sharing", _machine("2pkg-2node-8gpu-4nic")).what
        assert what == "gpu0-3 share mlx5_0 if each takes the first near one, while mlx5_1 is idle"

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("2pkg-8node-smt2-8gpu-pairs", "no two GPUs share a NIC while another one is as near and idle"),
            ("2pkg-2node-smt2-8gpu-h100", "no RDMA NIC (InfiniBand, RoCE) was found"),
            ("1pkg-nonode-2cpu", "no GPU"),
        ],
    )
    def test_nothing_to_find(self, name: str, what: str) -> None:
        """Each other machine says why there is nothing to find."""
        finding = _find("nic-sharing", _machine(name))
        assert (finding.severity, finding.what) == (OK, what)

    def test_unknown_links(self) -> None:
        """Without links, the check has no answer."""
        finding = _find("nic-sharing", replace(_machine("2pkg-2node-8gpu-16nic"), links=()))
        assert (finding.severity, finding.what) == (None, "the links between GPUs and NICs are unknown")


class TestPackage:
    """NICs on a package without GPUs."""

    def test_all_nics(self) -> None:
        """If every NIC is there, all traffic crosses the sockets: a warning."""
        finding = _find("nic-package", _machine("2pkg-2node-4gpu-2nic-far"))
        assert (finding.severity, finding.what) == (
            WARNING,
            "all GPUs are on socket 0, and all NICs on another one: mlx5_0, mlx5_1",
        )
        assert finding.remedy == "move the card to a slot of socket 0"

    def test_one_nic(self) -> None:
        """A single NIC there is a note, and NCCL can be kept off it."""
        machine = _machine("2pkg-2node-4gpu-2nic-far")
        nics = tuple(replace(nic, node=0) if nic.name in ("mlx5_0", "ib0") else nic for nic in machine.nics)
        finding = _find("nic-package", replace(machine, nics=nics))
        assert (finding.severity, finding.what) == (NOTE, "all GPUs are on socket 0; on another one: mlx5_1")
        assert "export NCCL_IB_HCA=^=mlx5_1" in (finding.remedy or "")

    def test_gpus_of_unknown_place(self) -> None:
        """Without the GPUs' nodes, the check has no answer."""
        machine = _machine("2pkg-2node-4gpu-2nic-far")
        gpus = tuple(replace(gpu, node=None, node_source=None) for gpu in machine.gpus)
        finding = _find("nic-package", replace(machine, gpus=gpus))
        assert (finding.severity, finding.what) == (None, "the sockets of the GPUs are unknown")

    @pytest.mark.parametrize("name", ["2pkg-2node-8gpu-16nic", "2pkg-2node-smt2-8gpu-h100", "1pkg-nonode-2cpu"])
    def test_nothing_to_find(self, name: str) -> None:
        """GPUs on both packages, no NIC, no GPU."""
        assert _find("nic-package", _machine(name)).severity is OK


class TestSlingshot:
    """NICs that have RDMA without a verbs device."""

    NICS = tuple(Nic(name=f"cxi{number}", node=number, kind=NicKind.SLINGSHOT) for number in range(2))

    def test_they_are_rdma_nics(self) -> None:
        """No check says that the machine has no RDMA NIC; that of shared verbs devices has nothing to find."""
        machine = replace(grid(packages=2, nodes=1, gpus=[0, 1]), nics=self.NICS)
        sharing, package = _find("nic-sharing", machine), _find("nic-package", machine)
        assert (sharing.severity, sharing.what) == (OK, "no NIC has a verbs device: those of Slingshot have none")
        assert (package.severity, package.what) == (OK, "no NIC is known to be on a socket without a GPU")

    def test_far_ones_are_found(self) -> None:
        """One on a socket without GPUs is a note; NCCL_IB_HCA cannot name it."""
        finding = _find("nic-package", replace(grid(packages=2, nodes=1, gpus=[0]), nics=self.NICS))
        assert (finding.severity, finding.what) == (NOTE, "all GPUs are on socket 0; on another one: cxi1")
        assert finding.remedy == "move the card to a slot of socket 0"

    def test_variables_cannot_name_them(self) -> None:
        """A name in the variables of verbs libraries fits none of them."""
        machine = replace(grid(packages=2, nodes=1, gpus=[0, 1]), nics=self.NICS)
        finding = _find("nic-names", machine, {"NCCL_IB_HCA": "=cxi0"})
        assert (finding.severity, finding.what) == (WARNING, "NCCL_IB_HCA names cxi0, which no NIC here has")
        assert "those of Slingshot have none" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("variable", "value", "wrong"),
    [
        ("NCCL_IB_HCA", "mlx5", ""),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_3:1", ""),
        ("NCCL_IB_HCA", "=mlx5_1,mlx5_9:1", "mlx5_9"),
        ("NCCL_IB_HCA", "=mlx5", "mlx5"),
        ("NCCL_IB_HCA", "bnxt", "bnxt*"),
        ("NCCL_IB_HCA", "^mlx5_9", ""),
        ("NCCL_IB_HCA", "^=mlx5_9", ""),
        ("UCX_NET_DEVICES", "all", ""),
        ("UCX_NET_DEVICES", "mlx5_0:1,eth0", ""),
        ("UCX_NET_DEVICES", "mlx5_4:1,mlx5_0:1", "mlx5_4"),
        ("UCX_NET_DEVICES", "^mlx5_9:1", ""),
        ("UCX_NET_DEVICES", "mlx5_*:1", ""),
        ("NVSHMEM_HCA_LIST", "mlx5_0:1,mlx5_7:1", "mlx5_7"),
        ("NVSHMEM_HCA_PE_MAPPING", "mlx5_0:1:2,mlx4_0:1:2", "mlx4_0"),
        ("NVSHMEM_HCA_PE_MAPPING", "", ""),
    ],
)
def test_names_that_no_nic_has(variable: str, value: str, wrong: str) -> None:
    """Each library's notation is understood: beginnings of names, exact names, ports, counts, exclusions."""
    finding = _find("nic-names", _machine("2pkg-2node-8gpu-4nic"), {variable: value})
    if wrong:
        assert (finding.severity, finding.what) == (WARNING, f"{variable} names {wrong}, which no NIC here has")
        assert "mlx5_0, mlx5_1, mlx5_2, mlx5_3" in (finding.remedy or "")
    else:
        assert finding.severity is OK


def test_names_in_the_environment_of_ranks() -> None:
    """What a rank's own environment names is checked, too, and each fault is reported once."""
    jobs = {"host:29500": {rank: {"NVSHMEM_HCA_LIST": "mlx5_9:1"} for rank in range(8)}}
    host = Host(tree=Tree("/nonexistent"), topology=_machine("2pkg-2node-8gpu-4nic"), live=live(jobs=jobs))
    (finding,) = (f for f in examine(host) if f.check == "nic-names")
    assert finding.what == "NVSHMEM_HCA_LIST names mlx5_9, which no NIC here has"


def test_an_adapter_with_two_names_is_one() -> None:
    """A verbs and a network name of one device are not two NICs of which one is idle."""
    nics = (
        Nic(name="mlx5_0", pci="0000:20:00.0", node=0, kind=NicKind.INFINIBAND),
        Nic(name="ib0", pci="0000:20:00.0", node=0, kind=NicKind.INFINIBAND),
    )
    links = tuple(Link(a=f"gpu{gpu}", b=nic.name, kind="PIX") for gpu in range(2) for nic in nics)
    assert _find("nic-sharing", replace(grid(gpus=[0, 0]), nics=nics, links=links)).severity is OK


def test_running_ranks_are_found() -> None:
    """Ranks of any launcher are found by their variables; what a rank starts does not count."""
    environ = {**os.environ, "MASTER_ADDR": "head", "MASTER_PORT": "4711"}
    child = (
        "import os, subprocess as s, sys; os.environ['NCCL_IB_HCA'] = 'other'; s.run([sys.executable, '-c', 'input()'])"
    )
    ranks = []
    for rank, hca in enumerate(("mlx5_0", "mlx5_1")):
        environ = {
            **os.environ,
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "head",
            "MASTER_PORT": "4711",
            "NCCL_IB_HCA": hca,
        }
        ranks.append(subprocess.Popen([sys.executable, "-c", child], env=environ, stdin=subprocess.PIPE))
    try:
        assert reading.running_jobs()["head:4711"] == {0: {"NCCL_IB_HCA": "mlx5_0"}, 1: {"NCCL_IB_HCA": "mlx5_1"}}
    finally:
        for process in ranks:
            process.communicate(b"\n")
