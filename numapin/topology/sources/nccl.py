"""The nodes of PCI devices in an NCCL topology file, which cloud images name by NCCL_TOPO_FILE.

Source: NCCL's graph/xml.cc and topo.cc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.bounds import MAX_NODES
from numapin.topology.address import pci_address

if TYPE_CHECKING:
    from numapin.topology.sources.xmlfile import Element


def nccl_nodes(root: Element) -> dict[str, int]:
    """Return the node of every PCI address. Raises MachineFileError that names the file, the line and the element."""
    elements = list(root.named("cpu"))  # each is a NUMA node
    if not elements:
        raise root.error("it has no <cpu>")
    if len(elements) > MAX_NODES:
        raise elements[MAX_NODES].error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    seen: set[int] = set()
    nodes: dict[str, int] = {}
    for element in elements:
        node = element.optional_id("numaid")
        if node is None:
            continue
        if node in seen:
            raise element.error(f"numaid={node} appears twice: the file describes several hosts")
        seen.add(node)
        addresses = (pci_address(device.text("busid")) for device, _ in element.walk() if device.tag == "pci")
        # Bus ffff:ff is that of switches which the file's author made up.
        nodes |= {address: node for address in addresses if address and not address.startswith("ffff:ff:")}
    return nodes
