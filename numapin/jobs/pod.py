"""The pod of a Kubernetes job: one builder for all forms. Pure.

Comes in: a `JobRequest`, and what differs between forms: the container's name, variables, and shell lines. Goes out:
the template of a pod with one container, which runs `numapin run` as one host's part of the job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from numapin.base.not_none import without_none
from numapin.errors import UsageError
from numapin.jobs import claims, shell
from numapin.jobs.image import in_registry
from numapin.jobs.manifest import Noted
from numapin.jobs.pod_options import SHM, Gang, VolumeKind
from numapin.topology.model import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.jobs.pod_options import PodOptions, Toleration, Volume
    from numapin.jobs.request import JobRequest

DEVICES: Final = {
    GpuVendor.NVIDIA: "nvidia.com/gpu",
    GpuVendor.AMD: "amd.com/gpu",
    GpuVendor.INTEL: "gpu.intel.com/i915",
}
"""The resource of each vendor's device plugin."""

_CPUS: Final = """\
Whole CPUs and limits equal to requests make the pod Guaranteed. Only then does the kubelet's static CPU
manager assign exclusive CPUs, and its topology manager CPUs near the GPUs."""
_SYS_NICE: Final = """\
Without SYS_NICE the default seccomp profile refuses set_mempolicy and mbind. numapin then binds CPUs only,
and says so. A custom profile that allows both calls works as well."""
_IPC_LOCK: Final = "IPC_LOCK lets NCCL and UCX register memory with RDMA devices beyond the limit on locked memory."
_SHM: Final = "torch's DataLoader passes batches through /dev/shm, which has 64 MiB in a pod. numapin's does not."
# Set by numapin or by an operator, from the options of `numapin job`.
_RESERVED: Final = frozenset(
    f"PET_{name}"
    for name in (
        *("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_CONF", "LOCAL_ADDR"),
    )
)
_LEAVE_OUT: Final = "leave it out"
_SET_FOR_RANKS: Final = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), _LEAVE_OUT),
    **dict.fromkeys(("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"), _LEAVE_OUT),
    **{f"TORCHELASTIC_{name}": _LEAVE_OUT for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")},
    "NUMAPIN_BINDING": _LEAVE_OUT,
    "NUMAPIN_CHILDREN": _LEAVE_OUT,
    "NUMAPIN_DATALOADER": "give --dataloader instead",
    "NUMAPIN_NIC_ENV": "give --nic-env instead",
    "NUMAPIN_ROLES": "give --cores-for instead",
    "NUMAPIN_STEPS": _LEAVE_OUT,
    "NUMAPIN_TRACE": _LEAVE_OUT,
}
"""The variables that numapin sets for the ranks, each with what to do instead of setting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodForm:
    """The differences between the pods of the forms.

    Attributes:
        container: The container's name.
        variables: Variables of `numapin run`, as entries of `env`.
        exports: Shell lines that export variables which only the pod itself knows.
        restart_policy: The pod's restartPolicy. None: the operator or the API's default decides.
        subdomain: The Service by which the pod is found. None: the operator decides.
        labels: Labels of the pod.
        annotations: Annotations of the pod, besides the user's.
    """

    container: str
    variables: list[dict[str, object]] = field(default_factory=list)
    exports: tuple[str, ...] = ()
    restart_policy: str | None = None
    subdomain: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def template(request: JobRequest, name: str, form: PodForm) -> dict[str, object]:
    """Return the template of the pods of the job called `name`, with labels and annotations if there are any."""
    annotations = {**form.annotations, **dict(request.pod.annotations)}
    metadata = without_none({"labels": dict(form.labels) or None, "annotations": annotations or None})
    return without_none({"metadata": metadata or None, "spec": _spec(request, name, form)})


def num_gpus(request: JobRequest) -> int:
    """Return the number of GPUs that a cluster counts on each host: whole ones, where ranks use tiles."""
    return -(-request.gpus_per_node // request.tiles_per_gpu)  # rounded up


def named(values: Mapping[str, str]) -> list[dict[str, object]]:
    """Return variables with a value as entries of `env`."""
    return [{"name": name, "value": value} for name, value in values.items()]


def from_pod(name: str, field_path: str) -> dict[str, object]:
    """Return a variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field_path}}}


def _spec(request: JobRequest, name: str, form: PodForm) -> dict[str, object]:
    options = request.pod
    return without_none(
        {
            "subdomain": form.subdomain,
            "restartPolicy": form.restart_policy,
            **_limits(request),
            "schedulerName": _scheduler(options),
            "serviceAccountName": options.service_account,
            "imagePullSecrets": [{"name": secret} for secret in options.pull_secrets] or None,
            "nodeSelector": dict(options.node_selector) or None,
            "tolerations": [_toleration(taint) for taint in options.tolerations] or None,
            "resourceClaims": _claims(options, name),
            "containers": [_container(request, form)],
            "volumes": _volumes(request),
        }
    )


def _limits(request: JobRequest) -> dict[str, object]:
    """Return the time limit, minus the time to save, which a pod gets between SIGTERM and SIGKILL.

    The limit is the pod's, because a Job's own limit would include the time in which no host was free.
    """
    signal_s = request.signal_s or 0
    return {
        "activeDeadlineSeconds": request.time_s and request.time_s - signal_s,
        "terminationGracePeriodSeconds": request.signal_s and signal_s + 10,  # the launcher ends after its ranks
    }


def _toleration(taint: Toleration) -> dict[str, object]:
    operator = "Exists" if taint.value is None else "Equal"
    return without_none({"key": taint.key, "operator": operator, "value": taint.value, "effect": taint.effect})


def _scheduler(options: PodOptions) -> str | None:
    return options.scheduler or ("volcano" if options.gang is Gang.VOLCANO else None)


def _claims(options: PodOptions, name: str) -> list[dict[str, str]] | None:
    claim = {"name": claims.CLAIM, "resourceClaimTemplateName": claims.template_name(name)}
    return [claim] if options.device_classes else None


def _container(request: JobRequest, form: PodForm) -> dict[str, object]:
    """Return a container that runs `numapin run`, with all sizes as requests and limits."""
    start = "\n".join([shell.OPEN_FILES, *form.exports, 'exec "$@"'])
    return without_none(
        {
            "name": form.container,
            "image": in_registry(request.container or ""),
            "command": ["sh", "-c", _unexpanded(start), "sh"],
            "args": [_unexpanded(word) for word in _arguments(request)],
            "env": _environment(request, form) or None,
            "envFrom": [_env_source(*source) for source in request.pod.env_from] or None,
            "resources": Noted(value=_resources(request), note=_CPUS),
            "securityContext": _security(request),
            "volumeMounts": _mounts(request) or None,
        }
    )


def _arguments(request: JobRequest) -> list[str]:
    """Return the command line of `numapin run`."""
    grace = [f"--shutdown-timeout={request.signal_s}"] if request.signal_s else []
    return ["numapin", "run", *grace, *request.run_options, *shell.run_command(request)]


def _environment(request: JobRequest, form: PodForm) -> list[dict[str, object]]:
    """Return numapin's variables and the user's. Raises UsageError for one of the user's that numapin sets."""
    taken = _RESERVED | {str(entry["name"]) for entry in form.variables}
    for name, _ in request.pod.env:
        if name in taken:
            raise UsageError(f"--env {name}: the manifest sets this variable itself", _LEAVE_OUT)
        if name in _SET_FOR_RANKS:
            raise UsageError(f"--env {name}: numapin sets this variable itself, for each rank", _SET_FOR_RANKS[name])
    return [*form.variables, *named({name: _unexpanded(value) for name, value in request.pod.env})]


def _env_source(kind: VolumeKind, name: str) -> dict[str, object]:
    return {"secretRef" if kind is VolumeKind.SECRET else "configMapRef": {"name": name}}


def _resources(request: JobRequest) -> dict[str, object]:
    """Return the sizes, which have to be numbers, and the claim of DRA's devices."""
    has_claim = bool(request.pod.device_classes)
    amounts = without_none(
        {
            "cpu": request.cpus_per_task,
            "memory": f"{(request.memory_bytes or 0) >> 20}Mi",
            DEVICES[request.vendor]: None if has_claim else num_gpus(request) or None,
            **{name: _amount(text) for name, text in request.pod.resources},
        }
    )
    claim = {"claims": [{"name": claims.CLAIM}]} if has_claim else {}
    return {"requests": amounts, "limits": amounts, **claim}


def _amount(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _security(request: JobRequest) -> Noted | None:
    """Return the capabilities to add, each with its reason. None: none."""
    reasons = {"SYS_NICE": _SYS_NICE if request.sys_nice else "", "IPC_LOCK": _IPC_LOCK if request.pod.ipc_lock else ""}
    added = {name: reason for name, reason in reasons.items() if reason}
    return Noted(value={"capabilities": {"add": [*added]}}, note="\n".join(added.values())) if added else None


def _mounts(request: JobRequest) -> list[dict[str, object]]:
    own = [_mount(number, volume) for number, volume in enumerate(request.pod.volumes)]
    return [{"name": "shm", "mountPath": SHM}, *own] if _needs_shm(request) else own


def _mount(number: int, volume: Volume) -> dict[str, object]:
    return without_none({"name": _volume_name(number), "mountPath": volume.path, "readOnly": volume.read_only or None})


def _volumes(request: JobRequest) -> Noted | list[dict[str, object]] | None:
    own = [_volume(number, volume) for number, volume in enumerate(request.pod.volumes)]
    if _needs_shm(request):
        shm: dict[str, object] = {"name": "shm", "emptyDir": {"medium": "Memory"}}
        return Noted(value=[shm, *own], note=_SHM)
    return own or None


def _needs_shm(request: JobRequest) -> bool:
    return not request.dataloader and not request.pod.has_shm


def _volume_name(number: int) -> str:
    return f"volume-{number}"


def _volume(number: int, volume: Volume) -> dict[str, object]:
    sources: dict[VolumeKind, tuple[str, dict[str, object]]] = {
        VolumeKind.PVC: (
            "persistentVolumeClaim",
            without_none({"claimName": volume.name, "readOnly": volume.read_only or None}),
        ),
        VolumeKind.SECRET: ("secret", {"secretName": volume.name}),
        VolumeKind.CONFIGMAP: ("configMap", {"name": volume.name}),
        VolumeKind.EMPTYDIR: ("emptyDir", {"medium": "Memory"} if volume.path == SHM else {}),
        VolumeKind.HOST: ("hostPath", {"path": volume.name}),
    }
    key, source = sources[volume.kind]
    return {"name": _volume_name(number), key: source}


def _unexpanded(text: str) -> str:
    """Escape text in commands, arguments and variables, in which Kubernetes replaces $(NAME) by a variable."""
    return re.sub(r"\$\$+|\$(?=\()", lambda dollars: dollars[0] * 2, text)
