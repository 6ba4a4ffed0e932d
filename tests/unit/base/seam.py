"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.base import cpu_set, formats
from numapin.base.bounds import MAX_GPUS, MAX_LINKS, MAX_NICS, MAX_NODES, MAX_RANKS
from numapin.base.cpu_set import CpuSet
from numapin.base.files import (
    OpenFolder,
    OpenPlace,
    is_writable,
    make_folders,
    make_own,
    opened,
    read_file,
    write_text_to,
)
from numapin.base.formats import did_you_mean
from numapin.base.records import AtMost, Texts, read_record, to_json
from numapin.base.redact import is_secret, without_secrets
from numapin.base.stderr import say
from numapin.base.strict_json import decode, encode
from numapin.base.text import counted, listed, not_none, without_none
from numapin.cli.entry import read_line
from numapin.cli.main import numapin
from numapin.rank import handover
from numapin.system.tree import Tree
from numapin.tasks.identify import find_task
from numapin.topology.build import build
from numapin.topology.readings import CpuReading, NodeReading, PciReading, Readings
