"""Kubernetes: manifests for kubectl apply. Pure.

Comes in: a `JobRequest`. Goes out: YAML of the form requested: a Job, JobSet, TrainJob, LeaderWorkerSet or PyTorchJob,
with what it needs beside it. What a form cannot do is an error, or a warning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError
from numapin.jobs import kubernetes_forms as forms
from numapin.jobs.claims import claim_template
from numapin.jobs.image import in_registry
from numapin.jobs.manifest import yaml_document
from numapin.jobs.pod import DEVICES, num_gpus
from numapin.jobs.pod_options import Gang
from numapin.jobs.request import KubernetesKind
from numapin.topology.model import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numapin.jobs.pod_options import PodOptions
    from numapin.jobs.request import JobRequest

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_QUEUE: Final = re.compile(rf"(?=.{{1,63}}$){_LABEL}(?:\.{_LABEL})*")
_IMAGE_OPTION: Final = "--container registry/image:tag (with numapin in it)"
_IMAGE: Final = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FormOf:
    """A form.

    Attributes:
        build: The function that returns its documents.
        longest_name: The limit of a job's name. A pod's name, with what a controller appends, has at most 63
            characters.
        refused: The options that it cannot do, by click's names, each with its reason and remedy.
    """

    build: Callable[[JobRequest, str], list[dict[str, object]]]
    longest_name: int
    refused: Mapping[str, tuple[str, str]]


_ENDLESS: Final = ("a LeaderWorkerSet runs until it is deleted", "leave it out, or use --form jobset")
_FORMS: Final = {
    KubernetesKind.JOB: _FormOf(build=forms.job, longest_name=52, refused={}),
    KubernetesKind.JOBSET: _FormOf(build=forms.jobset, longest_name=44, refused={}),
    KubernetesKind.TRAINJOB: _FormOf(
        build=forms.trainjob,
        longest_name=44,
        refused={"ttl": ("Kubeflow Trainer does not delete finished jobs", "leave it out, or use --form jobset")},
    ),
    KubernetesKind.LEADERWORKERSET: _FormOf(
        build=forms.leaderworkerset,
        longest_name=44,
        refused={
            "time": _ENDLESS,
            "ttl": _ENDLESS,
            "requeue": ("a LeaderWorkerSet always starts its pods again", "leave it out"),
            "coscheduling": (
                "the LeaderWorkerSet controller makes gangs for Volcano only",
                "use --gang volcano, or leave it out",
            ),
        },
    ),
    KubernetesKind.PYTORCHJOB: _FormOf(build=forms.pytorchjob, longest_name=52, refused={}),
}


def build(request: JobRequest) -> str:
    """Return the manifest. Raises UsageError for what Kubernetes or the form does not take, and for missing sizes."""
    form, name, gpus = _FORMS[request.kind], job_name(request), num_gpus(request)
    _require_name(name, form)
    _require_queue(request)
    _require_complete(request)
    _require_image(request)
    _require_possible(request, form)
    request.pod.require_claimable(gpus)
    claims = [claim_template(name, gpus, request.pod)] if request.pod.device_classes else []
    return "".join(yaml_document(document) for document in [*claims, *form.build(request, name)])


def warnings(request: JobRequest) -> tuple[str, ...]:
    """Return what to check, because the form, the driver or the network may need more than the manifest says."""
    is_leader_worker_set = request.kind is KubernetesKind.LEADERWORKERSET
    gang_of = None if request.pod.gang is None else request.kind
    known = (
        (
            _ends_after_time(request),
            "a PyTorchJob is not restarted after --time: apply it again, or use --form job",
        ),
        (
            _requests_intel_gpus(request),
            f"{DEVICES[GpuVendor.INTEL]} is for GPUs with the driver i915; with the driver xe, write gpu.intel.com/xe "
            "instead",
        ),
        (
            _has_unlocked_rdma(request.pod),
            "RDMA devices without --ipc-lock: NCCL fails where the limit on locked memory is low",
        ),
        (
            gang_of is KubernetesKind.PYTORCHJOB,
            "the training operator makes gangs only if it runs with --gang-scheduler-name",
        ),
        (
            gang_of is KubernetesKind.LEADERWORKERSET,
            "the LeaderWorkerSet controller makes gangs only if gangSchedulingManagement is in its configuration",
        ),
        (
            is_leader_worker_set and request.nodes > 1 and not _has_secret(request.pod),
            "a LeaderWorkerSet gives its pods no secret for the rendezvous: put PET_RDZV_ID into a Secret, such as "
            "rendezvous, and add --env-from secret/rendezvous",
        ),
    )
    return tuple(text for is_given, text in known if is_given)


def _ends_after_time(request: JobRequest) -> bool:
    """Return whether the job's time ends it, although it is to be requeued."""
    return request.kind is KubernetesKind.PYTORCHJOB and request.requeue and bool(request.time_s)


def _requests_intel_gpus(request: JobRequest) -> bool:
    """Return whether Intel GPUs are requested as a resource, not claimed from DRA."""
    return request.vendor is GpuVendor.INTEL and bool(request.gpus_per_node) and not request.pod.device_classes


def _has_unlocked_rdma(pod: PodOptions) -> bool:
    return not pod.ipc_lock and any("rdma" in name for name, _ in pod.resources)


def _has_secret(pod: PodOptions) -> bool:
    """Return whether the pods may get a secret for the rendezvous."""
    return bool(pod.env_from) or any(name == "PET_RDZV_ID" for name, _ in pod.env)


def job_name(request: JobRequest) -> str:
    """Return the given name, or one derived from the script's that Kubernetes accepts."""
    made = request.job_name.lower()
    return request.name or (made if made[0].isalpha() else f"job-{made}")


def _require_name(name: str, form: _FormOf) -> None:
    if not _NAME.fullmatch(name) or len(name) > form.longest_name:
        raise UsageError(
            f"--job-name {name!r} is not a valid Kubernetes name",
            f"use lower case letters, digits and -, starting with a letter, at most {form.longest_name}",
        )


def _require_queue(request: JobRequest) -> None:
    if request.queue is not None and not _QUEUE.fullmatch(request.queue):
        raise UsageError(
            f"--queue {request.queue!r} is not the name of a Kueue LocalQueue",
            "use lower case letters, digits and -, such as team-a",
        )


def _require_complete(request: JobRequest) -> None:
    """Raise UsageError that names everything that a pod needs and the request lacks."""
    sizes = {
        "its CPUs as a number": (request.cpus_per_task, "--cpus-per-task N"),
        "its memory as a number": (request.memory_bytes, "--mem-per-node SIZE"),
    }
    needs = {"an image": (request.container, _IMAGE_OPTION), **sizes}
    missing = {need: option for need, (value, option) in needs.items() if value is None}
    if not missing:
        return
    lacks_size = not sizes.keys().isdisjoint(missing)
    why = "; without these numbers it is not Guaranteed, and gets no CPUs of its own" if lacks_size else ""
    other = "; --machine FILE (numapin topo --save FILE) has CPUs and memory" if lacks_size else ""
    raise UsageError(f"a pod needs {_joined(tuple(missing))}{why}", f"give {_joined(tuple(missing.values()))}{other}")


def _joined(words: tuple[str, ...]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _require_image(request: JobRequest) -> None:
    if not _IMAGE.fullmatch(in_registry(request.container or "") or ""):
        raise UsageError(
            f"--container {request.container!r} is not an image in a registry",
            "for example: --container registry/image:tag",
        )


def _require_possible(request: JobRequest, form: _FormOf) -> None:
    """Raise UsageError for an option that the form cannot do."""
    given = {
        "time": ("--time", request.time_s is not None),
        "ttl": ("--ttl", request.pod.ttl_s is not None),
        "requeue": ("--requeue", request.requeue),
        "coscheduling": ("--gang coscheduling", request.pod.gang is Gang.COSCHEDULING),
    }
    for name, (why, remedy) in form.refused.items():
        option, is_given = given[name]
        if is_given:
            raise UsageError(f"{option} with --form {request.kind}: {why}", remedy)
