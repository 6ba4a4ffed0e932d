"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.jobs import image
from numapin.jobs.request import Form, JobRequest, KubernetesKind
from numapin.jobs.share import sized
from numapin.topology.vendors import GpuVendor
