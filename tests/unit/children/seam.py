"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base.cpu_set import CpuSet
from numapin.children import command
from numapin.children.command import conclude
from numapin.children.frameworks import FRAMEWORKS, variables
from numapin.children.own import is_chosen
from numapin.children.table import ChildTable, DeviceEntry, UnknownDevice, device_of, known_device, num_visible
from numapin.rank.become import BINDING, CHILDREN
from numapin.rank.handover import slice_text
from numapin.rank.hook_env import HOOK
from numapin.system import proc
from numapin.topology.vendors import hiding_variables
