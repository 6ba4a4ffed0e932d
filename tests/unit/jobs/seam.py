"""The only place of these tests that imports numapin's internals."""

from __future__ import annotations

from numapin.cli.job import job
from numapin.jobs import image, kubernetes, scripts
from numapin.jobs.pod_options import SHM
from numapin.jobs.request import Form, JobRequest, KubernetesKind, Launch
from numapin.jobs.share import sized
from numapin.topology.vendors import GpuVendor
