"""Kubernetes: manifests for kubectl apply.

What a form cannot do is an error, or a warning. Each pod is one host's part of the job and runs `numapin run`, which
finds the others by the variables of the form's controller. The fields of a Job are those of Kubernetes 1.29 or newer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Final

from numapin.base.text import without_none
from numapin.errors import UsageError
from numapin.jobs import scripts
from numapin.jobs.manifest import Lines, fill
from numapin.jobs.notation import in_registry
from numapin.jobs.pod_options import SHM, PodSecurity, VolumeKind
from numapin.jobs.request import KubernetesKind
from numapin.topology.vendors import GpuVendor, support_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.jobs.pod_options import PodOptions
    from numapin.jobs.request import JobRequest

_RETRIES: Final = 3
_CLAIM: Final = "gpus"
_MAX_DEVICES: Final = 32  # of a ResourceClaim (AllocationResultsMaxSize of resource.k8s.io/v1)
_WHOLE: Final = re.compile(r"[1-9][0-9]{0,14}")
# The secret of the launchers: it is random, the same in all pods of a Job, and new for each Job.
_JOB_UID: Final = "metadata.labels['batch.kubernetes.io/controller-uid']"
_DISRUPTED: Final = [{"type": "DisruptionTarget", "status": "True"}]
_SOURCES: Final = {
    VolumeKind.PVC: ("persistentVolumeClaim", "claimName"),
    VolumeKind.SECRET: ("secret", "secretName"),
    VolumeKind.CONFIGMAP: ("configMap", "name"),
    VolumeKind.EMPTYDIR: ("emptyDir", "medium"),
    VolumeKind.HOST: ("hostPath", "path"),
}
_WHY_SYS_NICE: Final = (
    "Without SYS_NICE the default seccomp profile refuses set_mempolicy and mbind. numapin then binds CPUs only,\n"
    'and says so. Pod Security\'s level "baseline" refuses SYS_NICE: see --pod-security.'
)
_WHY_NO_SYS_NICE: Final = (
    "The default seccomp profile refuses set_mempolicy and mbind: numapin binds CPUs only, and says so.\n"
    "Another profile, which allows them, can be named with --seccomp-profile."
)
_WHY_PROFILE: Final = "This profile has to allow set_mempolicy, get_mempolicy and mbind, or numapin binds CPUs only."
_WHY_IPC_LOCK: Final = "IPC_LOCK lets NCCL and UCX register memory with RDMA devices beyond the limit on locked memory."
_WHY_SHM: Final = "torch's DataLoader passes batches through /dev/shm, which has 64 MiB in a pod. numapin's does not."
_ALL_ALIKE: Final = "All GPUs of a pod have the same value of this attribute; a pod that cannot get them stays pending."
_EACH_ALIKE: Final = (
    "Each GPU has the same value of this attribute as its own devices, which serve the rank of that GPU."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The container of a kind of job, and what the kind differs in."""

    container: str
    has_index: bool = False  # whether pods know their number, but not how many they are
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # options, with the reason and the remedy


_ENDLESS: Final = ("a LeaderWorkerSet runs until it is deleted", "leave it out, or use --form jobset")
_FORMS: Final = {
    KubernetesKind.JOB: _Form(container="worker", has_index=True),
    KubernetesKind.JOBSET: _Form(container="node", has_index=True),
    # A TrainJob by itself cannot say all that the pods need: its patches changed between releases of the Trainer. So a
    # runtime holds them. The Trainer's torch policy sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and others, and it
    # requires the container's name.
    KubernetesKind.TRAINJOB: _Form(
        container="node",
        refused={"--ttl": ("Kubeflow Trainer does not delete finished jobs", "leave it out, or use --form jobset")},
    ),
    KubernetesKind.LEADERWORKERSET: _Form(
        container="worker",
        refused={
            "--time": _ENDLESS,
            "--ttl": _ENDLESS,
            "--requeue": ("a LeaderWorkerSet always starts its pods again", "leave it out"),
        },
    ),
}


def build(request: JobRequest) -> str:
    """Return the manifest. Raises UsageError for what the form does not take, and for missing sizes."""
    form, name, options = _FORMS[request.kind], job_name(request), request.pod
    _require_complete(request, form)
    retries = _RETRIES if request.requeue else 0
    values: dict[str, object] = {
        "name": name,
        "nodes": request.nodes,
        "num_ranks": request.num_ranks,
        "labels": {"kueue.x-k8s.io/queue-name": request.queue} if request.queue else None,
        "annotations": dict(options.annotations),
        "ttl_s": options.ttl_s,
        "no_retries": None if retries else 0,
        "retries_of_pods": retries or None,
        "max_failed_pods": 0 if retries else None,  # the others cannot go on without it
        "max_restarts": _RETRIES,
        # The Job's controller then asks the pods to end, which get the time to save before SIGKILL.
        "deadline_s": request.time_s and request.time_s - (request.signal_s or 0),
        "ignore_evictions": {"rules": [{"action": "Ignore", "onPodConditions": _DISRUPTED}]} if retries else None,
        "fail_on_eviction": {"rules": [{"action": "FailJob", "onPodConditions": _DISRUPTED}]} if retries else None,
    }
    values["restart_all"] = _filled("restart_all", values) if retries else None
    values["pod"] = _filled("pod", _pod_values(request, form, name))
    documents = [f"# {request.written_by}"]
    if options.device_classes:
        documents += _filled("claims", values | _claim_values(request, name))
    if request.kind is KubernetesKind.JOB and request.nodes > 1:
        documents += _filled("service", values)
    documents += _filled(request.kind.value, values)
    return "\n".join([*documents, ""])


def _filled(template: str, values: Mapping[str, object]) -> Lines:
    path = resources.files("numapin.jobs") / "templates" / f"{template}.yaml"
    return fill(path.read_text(encoding="ascii"), values)


def job_name(request: JobRequest) -> str:
    """Return the given name, or one derived from the script's that Kubernetes accepts."""
    made = request.job_name.lower()
    return request.name or (made if made[0].isalpha() else f"job-{made}")


# --- checks ----------------------------------------------------------------------------------------------------------


def _require_complete(request: JobRequest, form: _Form) -> None:
    """Raise UsageError for missing sizes, options that the form does not take, and too many claimed devices."""
    needs = (
        ("an image", request.container, "--container registry/image:tag (with numapin in it)"),
        ("its CPUs as a number", request.cpus_per_task, "--cpus-per-task N"),
        ("its memory as a number", request.memory_bytes, "--mem-per-node SIZE"),
    )
    missing = [(need, option) for need, value, option in needs if value is None]
    if missing:
        lacks_size = any(need != "an image" for need, _ in missing)
        why = "; without these numbers it is not Guaranteed, and gets no CPUs of its own" if lacks_size else ""
        other = "; --machine FILE (numapin topo --save FILE) has CPUs and memory" if lacks_size else ""
        what, options = (", ".join(words) for words in zip(*missing, strict=True))
        raise UsageError(f"a pod needs {what}{why}", f"give {options}{other}")
    if in_registry(request.container or "") is None:
        raise UsageError(
            f"--container {request.container!r} is not an image in a registry",
            "for example: --container registry/image:tag",
        )
    given = {
        "--time": request.time_s is not None,
        "--ttl": request.pod.ttl_s is not None,
        "--requeue": request.requeue,
    }
    for option, (why, remedy) in form.refused.items():
        if given[option]:
            raise UsageError(f"{option} with --form {request.kind}: {why}", remedy)
    classes, gpus = request.pod.device_classes, _num_gpus(request)
    if classes and gpus == 0:
        raise UsageError(f"--device-class {classes[0]}: the job has no GPUs", "give --gpus-per-node N")
    if gpus * len(classes) > _MAX_DEVICES:
        raise UsageError(
            f"--device-class: {gpus} GPUs, each with a device of every class, are {gpus * len(classes)} devices; a "
            f"ResourceClaim has at most {_MAX_DEVICES}",
            "give fewer classes, or write the claims yourself",
        )


def warnings(request: JobRequest) -> tuple[str, ...]:
    """Return what to check, because the form, the driver or the network may need more than the manifest says."""
    pod, found = request.pod, []
    if request.vendor is GpuVendor.INTEL and request.gpus_per_node and not pod.device_classes:
        driver = "is for GPUs with the driver i915; with the driver xe, write gpu.intel.com/xe instead"
        found.append(f"{support_of(GpuVendor.INTEL).kubernetes_resource} {driver}")
    if not pod.ipc_lock and any("rdma" in name for name, _ in pod.resources):
        found.append("RDMA devices without --ipc-lock: NCCL fails where the limit on locked memory is low")
    return tuple(found)


# --- values of the templates -----------------------------------------------------------------------------------------


def _num_gpus(request: JobRequest) -> int:
    """Return the number of GPUs that a cluster counts on each host: whole ones, where ranks use tiles."""
    return -(-request.gpus_per_node // request.tiles_per_gpu)  # rounded up


def _pod_values(request: JobRequest, form: _Form, name: str) -> dict[str, object]:
    """Return the values of a pod with one container, all of whose sizes are requests and limits."""
    options, kind = request.pod, request.kind
    signal_s = request.signal_s or 0
    grace = [f"--shutdown-timeout={request.signal_s}"] if request.signal_s else []
    has_shm = any(volume.path == SHM for volume in options.volumes)
    needs_shm = not request.dataloader and not has_shm
    volumes: list[dict[str, object]] = []
    mounts: list[dict[str, object]] = []
    if needs_shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": SHM})
    for number, volume in enumerate(options.volumes):
        read_only = {"readOnly": True} if volume.read_only else {}
        source, key = _SOURCES[volume.kind]
        settings: dict[str, object] = {key: volume.name}
        if volume.kind is VolumeKind.PVC:
            settings |= read_only
        if volume.kind is VolumeKind.EMPTYDIR:
            settings = {key: "Memory"} if volume.path == SHM else {}
        volumes.append({"name": f"volume-{number}", source: settings})
        mounts.append({"name": f"volume-{number}", "mountPath": volume.path, **read_only})
    why_security, security = _security(options)
    amounts = {"cpu": request.cpus_per_task, "memory": f"{(request.memory_bytes or 0) >> 20}Mi"}
    if _num_gpus(request) and not options.device_classes:
        amounts[support_of(request.vendor).kubernetes_resource] = _num_gpus(request)
    amounts |= {resource: int(text) if _WHOLE.fullmatch(text) else text for resource, text in options.resources}
    claims = {"claims": [{"name": _CLAIM}]} if options.device_classes else {}
    claim = {"name": _CLAIM, "resourceClaimTemplateName": f"{name}-{_CLAIM}"}
    arguments = [*grace, *request.run_options, *scripts.run_command(request)]
    return {
        "pod_metadata": {"annotations": dict(options.annotations)} if options.annotations else None,
        "subdomain": name if kind is KubernetesKind.JOB and request.nodes > 1 else None,
        "restart_policy": None if kind is KubernetesKind.LEADERWORKERSET else "Never",
        "grace_s": request.signal_s and signal_s + 10,  # the launcher ends after its ranks
        "scheduler": options.scheduler,
        "service_account": options.service_account,
        "pull_secrets": [{"name": secret} for secret in options.pull_secrets],
        "node_selector": dict(options.node_selector),
        "tolerations": [
            without_none(
                {
                    "key": taint.key,
                    "operator": "Exists" if taint.value is None else "Equal",
                    "value": taint.value,
                    "effect": taint.effect,
                }
            )
            for taint in options.tolerations
        ],
        "resource_claims": [claim] if options.device_classes else None,
        "container": form.container,
        "image": in_registry(request.container or ""),
        "args": [_unexpanded(word) for word in arguments],
        "env": _environment(request, form),
        "env_from": [
            {"secretRef" if source is VolumeKind.SECRET else "configMapRef": {"name": each}}
            for source, each in options.env_from
        ],
        "resources": {"requests": amounts, "limits": amounts, **claims},
        "why_security": why_security,
        "security": security,
        "mounts": mounts,
        "why_shm": _WHY_SHM if needs_shm else "",
        "volumes": volumes,
    }


def _security(options: PodOptions) -> tuple[str, dict[str, object]]:
    """Return the container's securityContext, and why. Levels: Kubernetes, "Pod Security Standards"."""
    profile, is_restricted = options.seccomp_profile, options.pod_security is PodSecurity.RESTRICTED
    is_nice = options.pod_security is PodSecurity.PRIVILEGED and not profile
    added = [*(["SYS_NICE"] if is_nice else []), *(["IPC_LOCK"] if options.ipc_lock else [])]
    seccomp = {"type": "Localhost", "localhostProfile": profile} if profile else {"type": "RuntimeDefault"}
    context = {
        "allowPrivilegeEscalation": False if is_restricted else None,
        "runAsNonRoot": True if is_restricted else None,
        "capabilities": without_none({"drop": ["ALL"] if is_restricted else None, "add": added or None}) or None,
        "seccompProfile": seccomp if profile or is_restricted else None,
    }
    without_profile = _WHY_SYS_NICE if is_nice else _WHY_NO_SYS_NICE
    why = [_WHY_PROFILE if profile else without_profile, *([_WHY_IPC_LOCK] if options.ipc_lock else [])]
    return "\n".join(why), without_none(context)


def _environment(request: JobRequest, form: _Form) -> list[dict[str, object]]:
    """Return the variables of `numapin run`, and the user's. Raises UsageError for one that is both."""
    kind, has_others = request.kind, request.nodes > 1
    values: dict[str, str] = {}
    if kind is not KubernetesKind.TRAINJOB:
        values = {"PET_NPROC_PER_NODE": str(request.num_ranks)}
    of_pod: dict[str, str] = {}
    if form.has_index and has_others:
        values["PET_NNODES"] = str(request.nodes)
        if kind is KubernetesKind.JOB and request.requeue:  # a pod is restarted alone: the other launchers meet again
            values["PET_MAX_RESTARTS"] = str(_RETRIES)
            of_pod["PET_LOCAL_ADDR"] = "status.podIP"
    if has_others and kind is not KubernetesKind.LEADERWORKERSET:
        of_pod["PET_RDZV_ID"] = _JOB_UID
    for variable, _ in request.pod.env:
        if variable in values or variable in of_pod:
            raise UsageError(f"--env {variable}: the manifest sets this variable itself", "leave it out")
    entries: list[dict[str, object]] = [{"name": variable, "value": value} for variable, value in values.items()]
    for variable, path in of_pod.items():
        entries.append({"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    return entries + [{"name": variable, "value": _unexpanded(value)} for variable, value in request.pod.env]


def _claim_values(request: JobRequest, name: str) -> dict[str, object]:
    """Return the devices of dynamic resource allocation (DRA, resource.k8s.io/v1, Kubernetes 1.34), one claim per pod.

    A rank's devices share an attribute; with the GPUs' class only, all GPUs of the pod do.
    """
    options, gpus = request.pod, _num_gpus(request)
    if len(options.device_classes) == 1:
        groups = [{"gpu": (options.device_classes[0], gpus)}]
    else:
        kinds = ["gpu", *(f"device-{number}" for number in range(1, len(options.device_classes)))]
        pairs = list(zip(kinds, options.device_classes, strict=True))
        groups = [{f"{kind}-{gpu}": (each, 1) for kind, each in pairs} for gpu in range(gpus)]
    requests = [
        {"name": device, "exactly": {"deviceClassName": each, "count": count}}
        for group in groups
        for device, (each, count) in group.items()
    ]
    constraints = [{"requests": [*group], "matchAttribute": options.match_attribute} for group in groups]
    return {
        "claim_template": f"{name}-{_CLAIM}",
        "device_requests": requests,
        "device_constraints": constraints if options.match_attribute else None,
        "why_constraints": _ALL_ALIKE if len(options.device_classes) == 1 else _EACH_ALIKE,
    }


def _unexpanded(text: str) -> str:
    """Escape text in commands, arguments and variables, in which Kubernetes replaces $(NAME) by a variable."""
    return re.sub(r"\$\$+|\$(?=\()", lambda dollars: dollars[0] * 2, text)
