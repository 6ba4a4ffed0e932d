"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base import cpu_set, formats
from numapin.base.cpu_set import CpuSet
from numapin.base.text import printable, printable_lines
from numapin.cli.output import json_text
from numapin.jobs import kubernetes, manifest, notation
from numapin.jobs.request import JobRequest, name_of
from numapin.topology.build import build
from numapin.topology.model import CpuSpeed, Mig, NodeKind, Pcie
from numapin.topology.nics import LinkKind, NicKind, rdma_adapters
from numapin.topology.sources import xmlfile
from numapin.topology.sources.hwloc import read_hwloc
from numapin.topology.sources.nccl import nccl_nodes, read_nccl
from numapin.topology.sources.sysfs import read_sysfs
from numapin.topology.vendors import PCI_ORDER
from numapin.view.picture import lay_out, svg

if TYPE_CHECKING:
    from numapin.topology.readings import Readings
