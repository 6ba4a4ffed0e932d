"""Devices of dynamic resource allocation (DRA): the ResourceClaimTemplate of a job's pods. Pure.

Comes in: the job's name, the number of GPUs of a pod, and the device classes. Goes out: the template, from which
Kubernetes makes one claim per pod, and the references to it. The API is resource.k8s.io/v1, of Kubernetes 1.34.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.not_none import without_none
from numapin.jobs.manifest import Noted

if TYPE_CHECKING:
    from numapin.jobs.pod_options import PodOptions

CLAIM: Final = "gpus"
_ALL_ALIKE: Final = "All GPUs of a pod have the same value of this attribute; a pod that cannot get them stays pending."
_EACH_ALIKE: Final = (
    "Each GPU has the same value of this attribute as its own devices, which serve the rank of that GPU."
)


def template_name(job: str) -> str:
    """Return the name of the template of a job."""
    return f"{job}-{CLAIM}"


def claim_template(job: str, gpus: int, options: PodOptions) -> dict[str, object]:
    """Return the template. A rank's devices share an attribute; with the GPUs' class only, all GPUs of the pod do."""
    has_gpus_only = len(options.device_classes) == 1
    requests, groups = _one_request(gpus, options) if has_gpus_only else _pairs(gpus, options)
    note = _ALL_ALIKE if has_gpus_only else _EACH_ALIKE
    constraints = [{"requests": group, "matchAttribute": options.match_attribute} for group in groups]
    devices = {
        "requests": requests,
        "constraints": Noted(value=constraints, note=note) if options.match_attribute else None,
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": template_name(job)},
        "spec": {"spec": {"devices": without_none(devices)}},
    }


def _one_request(gpus: int, options: PodOptions) -> tuple[list[dict[str, object]], list[list[str]]]:
    """Return one request for all GPUs, and the names of requests whose devices are alike."""
    (name,) = options.device_classes
    return [_request("gpu", name, gpus)], [["gpu"]]


def _pairs(gpus: int, options: PodOptions) -> tuple[list[dict[str, object]], list[list[str]]]:
    """Return requests for each GPU and its devices, and their names, one group per GPU."""
    kinds = ["gpu", *(f"device-{number}" for number in range(1, len(options.device_classes)))]
    groups = [[f"{kind}-{gpu}" for kind in kinds] for gpu in range(gpus)]
    requests = [
        _request(name, device_class, 1)
        for group in groups
        for name, device_class in zip(group, options.device_classes, strict=True)
    ]
    return requests, groups


def _request(name: str, device_class: str, count: int) -> dict[str, object]:
    return {"name": name, "exactly": {"deviceClassName": device_class, "count": count}}
