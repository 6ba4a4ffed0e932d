"""Kubernetes: manifests for kubectl apply. Pure.

Comes in: a `JobRequest`. Goes out: YAML of an Indexed Job, with the headless Service by which its pods find each other,
or of a PyTorchJob of Kubeflow's training operator, which makes its own Services. Each pod is one host's part of the job
and runs `numapin run`, which reads PET_* variables as torchrun does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError
from numapin.jobs import shell
from numapin.jobs.image import in_registry
from numapin.jobs.request import KubernetesKind
from numapin.topology.model import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.jobs.request import JobRequest

_PORT: Final = 29500
_DEVICES: Final = {
    GpuVendor.NVIDIA: "nvidia.com/gpu",
    GpuVendor.AMD: "amd.com/gpu",
    GpuVendor.INTEL: "gpu.intel.com/i915",
}
"""The resource of each vendor's device plugin."""
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_IMAGE: Final = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")
_IS_HOST: Final = 'export PET_RDZV_CONF="is_host=$((JOB_COMPLETION_INDEX == 0))"'
_RETRIES: Final = 3
# Signs the rendezvous: it is random, the same in all pods of a Job, and new for each Job.
_JOB_UID: Final = "metadata.labels['controller-uid']"
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_INDENT: Final = 2  # of a mapping inside a mapping or sequence
_NEVER_FOLDED: Final = 1 << 30  # characters in a line
# Strings that need no quotes, except for these words, which YAML 1.1 readers take for other values.
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_PLAIN: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
# Several lines of visible ASCII, none of them empty or ending in a space: a literal block holds them as they are.
_BLOCK: Final = re.compile(r"(?! )[ -~]*[!-~](\n[ -~]*[!-~])+")

_CPUS: Final = """\
Whole CPUs and limits equal to requests make the pod Guaranteed. Only then does the kubelet's static CPU
manager assign exclusive CPUs, and its topology manager CPUs near the GPUs."""
_SYS_NICE: Final = """\
Without SYS_NICE the default seccomp profile refuses set_mempolicy and mbind. numapin then binds CPUs only,
and says so. A custom profile that allows both calls works as well."""
_SHM: Final = "torch's DataLoader passes batches through /dev/shm, which has 64 MiB in a pod. numapin's does not."
_POD_FAILURE_POLICY: Final = {
    "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The value of a key, and a comment of one or more lines above that key."""

    value: object
    note: str


_SYS_NICE_CONTEXT: Final = Noted(value={"capabilities": {"add": ["SYS_NICE"]}}, note=_SYS_NICE)


def build(request: JobRequest) -> str:
    """Return the manifest. Raises UsageError for a name or image that is invalid, and for missing sizes."""
    _require_name(request)
    _require_image(request)
    _require_size("CPUs", request.cpus_per_task, "--cpus-per-task N")
    _require_size("memory", request.memory_bytes, "--mem-per-node SIZE")
    documents = _job(request) if request.kind is KubernetesKind.JOB else [_pytorchjob(request)]
    return "".join(yaml_document(document) for document in documents)


def warnings(request: JobRequest) -> tuple[str, ...]:
    """Return what to check: OnFailure does not restart a pod at its deadline; Intel has two drivers."""
    found = []
    if request.kind is KubernetesKind.PYTORCHJOB and request.requeue and request.time_s:
        found.append("a PyTorchJob is not restarted after --time: apply it again, or use --form job")
    if request.vendor is GpuVendor.INTEL and request.gpus_per_node:
        resource = _DEVICES[GpuVendor.INTEL]
        found.append(f"{resource} is for GPUs with the driver i915; with the driver xe, write gpu.intel.com/xe instead")
    return tuple(found)


def job_name(request: JobRequest) -> str:
    """Return the given name, or one derived from the script's that Kubernetes accepts."""
    made = request.job_name.lower()
    return request.name or (made if made[0].isalpha() else f"job-{made}")


def _require_name(request: JobRequest) -> None:
    if not _NAME.fullmatch(job_name(request)):
        raise UsageError(
            f"--job-name {job_name(request)!r} is not a valid Kubernetes name",
            "use lower case letters, digits and -, starting with a letter, at most 52",
        )


def _require_image(request: JobRequest) -> None:
    if request.container is None:
        raise UsageError("a pod needs an image", "give one that contains numapin: --container registry/image:tag")
    if not _IMAGE.fullmatch(in_registry(request.container) or ""):
        raise UsageError(
            f"--container {request.container!r} is not an image in a registry",
            "for example: --container registry/image:tag",
        )


def _require_size(resource: str, number: int | None, option: str) -> None:
    if number is None:
        raise UsageError(
            f"a pod needs its {resource} as a number: otherwise it is not Guaranteed, and gets no CPUs of its own",
            f"give it: {option}, or --machine FILE (topo --save)",
        )


def _job(request: JobRequest) -> list[dict[str, object]]:
    is_one_host = request.nodes == 1
    pod = {
        "subdomain": None if is_one_host else job_name(request),
        "restartPolicy": "Never",
        **_pod(request, "worker", _variables(request)),
    }
    policy = Noted(
        value=_POD_FAILURE_POLICY, note="A pod that was evicted or preempted is restarted, and not counted as failed."
    )
    spec = {
        "completions": request.nodes,
        "parallelism": request.nodes,
        "completionMode": "Indexed",
        "backoffLimit": _retries(request) * request.nodes,
        "podFailurePolicy": policy if request.requeue else None,
        "template": {"spec": _without_none(pod)},
    }
    job: dict[str, object] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request),
        "spec": _without_none(spec),
    }
    return [job] if is_one_host else [_service(job_name(request)), job]


def _service(name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": Noted(value="None", note=f"headless: gives each pod a name, such as {name}-0.{name}"),
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }


def _pytorchjob(request: JobRequest) -> dict[str, object]:
    """Return Kubeflow's job. Its operator sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and the other variables."""
    replica = {
        "restartPolicy": "OnFailure" if request.requeue else "Never",
        "template": {"spec": _pod(request, "pytorch", [])},
    }
    replicas: dict[str, object] = {"Master": {"replicas": 1, **replica}}
    if request.nodes > 1:
        replicas["Worker"] = {"replicas": request.nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(request),
        "spec": {
            "nprocPerNode": str(request.num_ranks),
            "runPolicy": {"backoffLimit": _retries(request), "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _retries(request: JobRequest) -> int:
    return _RETRIES if request.requeue else 0


def _metadata(request: JobRequest) -> dict[str, object]:
    labels = {_QUEUE_LABEL: request.queue} if request.queue else None
    return _without_none({"name": job_name(request), "labels": labels})


def _limits(request: JobRequest) -> dict[str, object]:
    """Return the time limit, minus the time to save, which a pod gets between SIGTERM and SIGKILL.

    The limit is the pod's, because a Job's own limit would include the time in which no host was free.
    """
    signal_s = request.signal_s or 0
    return _without_none(
        {
            "activeDeadlineSeconds": request.time_s and request.time_s - signal_s,
            "terminationGracePeriodSeconds": request.signal_s and signal_s + 10,  # the launcher ends after its ranks
        }
    )


def _variables(request: JobRequest) -> list[dict[str, object]]:
    """Return the options of torchrun, and so of `numapin run`, as variables."""
    values = {"PET_NNODES": str(request.nodes), "PET_NPROC_PER_NODE": str(request.num_ranks)}
    if request.nodes == 1:
        return _named(values)
    name = job_name(request)
    values |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{name}-0.{name}:{_PORT}"}
    if request.requeue:
        values["PET_MAX_RESTARTS"] = str(_RETRIES)
    return [*_named(values), _from_pod("PET_RDZV_ID", _JOB_UID), _from_pod("PET_LOCAL_ADDR", "status.podIP")]


def _named(values: Mapping[str, str]) -> list[dict[str, object]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _from_pod(name: str, field: str) -> dict[str, object]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _pod(request: JobRequest, container: str, variables: list[dict[str, object]]) -> dict[str, object]:
    """Return the spec of a pod with one container, and a volume at /dev/shm unless numapin's DataLoader is used."""
    described = {"name": container, **_container(request, variables)}
    if request.dataloader:
        return {**_limits(request), "containers": [described]}
    described["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - the pod's own
    shm = Noted(value=[{"name": "shm", "emptyDir": {"medium": "Memory"}}], note=_SHM)
    return {**_limits(request), "containers": [described], "volumes": shm}


def _container(request: JobRequest, variables: list[dict[str, object]]) -> dict[str, object]:
    """Return a container that runs `numapin run`, with all sizes as requests and limits."""
    is_indexed = bool(variables) and request.nodes > 1
    return _without_none(
        {
            "image": in_registry(request.container or ""),
            "command": ["sh", "-c", _unexpanded(_start(is_indexed=is_indexed)), "sh"],
            "args": [_unexpanded(word) for word in _arguments(request)],
            "env": variables or None,
            "resources": Noted(value=_resources(request), note=_CPUS),
            "securityContext": _SYS_NICE_CONTEXT if request.sys_nice else None,
        }
    )


def _start(*, is_indexed: bool) -> str:
    """Return the shell lines that run the container's arguments."""
    is_host = [_IS_HOST] if is_indexed else []
    return "\n".join([shell.OPEN_FILES, *is_host, 'exec "$@"'])


def _arguments(request: JobRequest) -> list[str]:
    """Return the command line of `numapin run`."""
    grace = [f"--shutdown-timeout={request.signal_s}"] if request.signal_s else []
    return ["numapin", "run", *grace, *request.run_options, *shell.run_command(request)]


def _resources(request: JobRequest) -> dict[str, object]:
    memory_bytes = request.memory_bytes or 0
    gpus = -(-request.gpus_per_node // request.tiles_per_gpu) or None  # rounded up
    device = _DEVICES[request.vendor]
    amounts = _without_none({"cpu": request.cpus_per_task, "memory": f"{memory_bytes >> 20}Mi", device: gpus})
    return {"requests": amounts, "limits": amounts}


def _without_none(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _unexpanded(text: str) -> str:
    """Escape text in commands and arguments, in which Kubernetes replaces $(NAME) by a variable."""
    return re.sub(r"\$\$+|\$(?=\()", lambda dollars: dollars[0] * 2, text)


# --- YAML ------------------------------------------------------------------------------------------------------------


def yaml_document(value: Mapping[str, object]) -> str:
    """Return a mapping as a YAML document, starting with `---`, that YAML 1.1 and 1.2 readers read the same way."""
    from ruamel.yaml import YAML  # here: no other command needs it

    writer = YAML()
    writer.explicit_start = True
    writer.allow_unicode = False  # invisible characters are escaped
    writer.width = _NEVER_FOLDED
    text = StringIO()
    writer.dump(_yaml_node(value, column=0), text)
    return text.getvalue()


def _yaml_node(value: object, *, column: int) -> object:
    """Return a value as ruamel.yaml's types, with quotes and comments; `column` is that of a mapping's keys.

    Every node is new, because the writer would turn a shared one into an anchor and aliases.
    """
    from ruamel.yaml.comments import CommentedSeq

    if isinstance(value, list):
        return CommentedSeq([_yaml_node(item, column=_inner_column(item, column)) for item in value])
    return _yaml_mapping(value, column) if isinstance(value, dict) else _yaml_scalar(value)


def _yaml_mapping(mapping: Mapping[str, object], column: int) -> object:
    from ruamel.yaml.comments import CommentedMap

    node = CommentedMap()
    for key, item in mapping.items():
        name = _yaml_scalar(key)
        value = item.value if isinstance(item, Noted) else item
        node[name] = _yaml_node(value, column=_inner_column(value, column))
        if isinstance(item, Noted):
            node.yaml_set_comment_before_after_key(name, before=item.note, indent=column)
    return node


def _inner_column(value: object, column: int) -> int:
    """Return the column of a value inside a mapping or sequence at `column`; only mappings are indented."""
    return column + (_INDENT if isinstance(value, dict) else 0)


def _yaml_scalar(value: object) -> object:
    """Return a string with quotes if a reader could misread it; other values stay as they are."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if not isinstance(value, str):
        return value
    if _BLOCK.fullmatch(value):
        return LiteralScalarString(value)
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN
    return value if is_plain else DoubleQuotedScalarString(value)
