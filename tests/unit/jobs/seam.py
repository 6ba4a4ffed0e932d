"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.jobs import notation
from numapin.jobs.request import Form, JobRequest, KubernetesKind, sized
from numapin.topology.vendors import GpuVendor
