"""Kubernetes: manifests for kubectl apply. Pure.

Comes in: a `JobRequest`. Goes out: YAML: an Indexed Job with the headless Service by which its pods find each other, or
a PyTorchJob of Kubeflow's training operator, which makes Services of its own. A pod is a node's part of the job: it
runs `numapin run`, which takes PET_* variables as torchrun does.
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.jobs.request import JobRequest

_PORT: Final = 29500
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_IMAGE: Final = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")
_IS_HOST: Final = 'export PET_RDZV_CONF="is_host=$((JOB_COMPLETION_INDEX == 0))"'
_RETRIES: Final = 3
# Random, the same in all pods of one Job, and new for each: what the rendezvous is signed with.
_JOB_UID: Final = "metadata.labels['controller-uid']"
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
_INDENT: Final = 2  # of a mapping in a mapping or sequence
_NEVER_FOLDED: Final = 1 << 30  # characters in a line
# Strings that every YAML reader takes for strings, and the words among them that a YAML 1.1 reader does not.
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_PLAIN: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})

_CPUS: Final = """\
Whole CPUs, and limits equal to requests: the QoS class Guaranteed, for which the kubelet's static CPU
manager gives CPUs that no other pod gets, and its topology manager those beside the GPUs."""
_SYS_NICE: Final = """\
Without SYS_NICE the usual seccomp profile refuses set_mempolicy and mbind. numapin then binds CPUs only,
and says so; a profile of your own that allows both calls does as well."""
_SHM: Final = "torch's DataLoader passes batches through /dev/shm, which has 64 MiB in a pod. numapin's does not."


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The value of a key, and a comment of one or more lines to write above that key."""

    value: object
    note: str


def build(request: JobRequest) -> str:
    """Return the manifest. Raises UsageError for what a pod needs and was not given."""
    _require(request)
    documents = _job(request) if request.kind is KubernetesKind.JOB else [_pytorchjob(request)]
    return "".join(yaml_document(document) for document in documents)


def warnings(request: JobRequest) -> tuple[str, ...]:
    """Return what was asked for and the cluster cannot do: a pod at its limit has failed, which OnFailure leaves so."""
    if request.kind is KubernetesKind.PYTORCHJOB and request.requeue and request.time_s:
        return ("a PyTorchJob is not started again after --time: apply it once more then, or use --form job",)
    return ()


def job_name(request: JobRequest) -> str:
    """Return the name that was given, or one made of the script's as Kubernetes takes it."""
    made = request.job_name.lower()
    return request.name or (made if made[0].isalpha() else f"job-{made}")


def _require(request: JobRequest) -> None:
    if not _NAME.fullmatch(job_name(request)):
        raise UsageError(
            f"--job-name {job_name(request)!r} is no name of Kubernetes",
            "use lower case letters, digits and -, a letter first, at most 52",
        )
    if request.container is None:
        raise UsageError("a pod needs an image", "name one that holds numapin: --container registry/image:tag")
    if not _IMAGE.fullmatch(in_registry(request.container) or ""):
        raise UsageError(
            f"--container {request.container!r} is no image of a registry",
            "for example: --container registry/image:tag",
        )
    for number, what, option in (
        (request.cpus_per_task, "CPUs", "--cpus-per-task N"),
        (request.memory_bytes, "memory", "--mem-per-node SIZE"),
    ):
        if number is None:
            raise UsageError(
                f"a pod gets {what} only by number: without one it is not Guaranteed, and nothing is pinned",
                f"say how much: {option}, or --machine FILE (topo --save)",
            )


def _job(request: JobRequest) -> list[dict[str, object]]:
    name = job_name(request)
    service: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": Noted(value="None", note="headless: a name for each pod, such as " + f"{name}-0.{name}"),
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }
    limits: dict[str, object] = {"backoffLimit": _RETRIES * request.nodes if request.requeue else 0}
    if request.requeue:
        limits["podFailurePolicy"] = Noted(
            value={
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            note="A pod that was evicted or preempted is started again, and does not count.",
        )
    job: dict[str, object] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request),
        "spec": {
            "completions": request.nodes,
            "parallelism": request.nodes,
            "completionMode": "Indexed",
            **limits,
            "template": {
                "spec": {
                    **({"subdomain": name} if request.nodes > 1 else {}),
                    "restartPolicy": "Never",
                    **_pod(request, "worker", _variables(request)),
                }
            },
        },
    }
    return [service, job] if request.nodes > 1 else [job]


def _pytorchjob(request: JobRequest) -> dict[str, object]:
    """Return Kubeflow's job. Its operator sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and the others itself."""
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
            "nprocPerNode": str(request.ranks),
            "runPolicy": {
                "backoffLimit": _RETRIES if request.requeue else 0,
                "cleanPodPolicy": "None",
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


def _metadata(request: JobRequest) -> dict[str, object]:
    labels = {"labels": {_QUEUE_LABEL: request.queue}} if request.queue else {}
    return {"name": job_name(request), **labels}


def _limits(request: JobRequest) -> dict[str, object]:
    """Return the time limit, less what is left for saving: a pod is told to stop then, and has that long for it.

    It is the pod's: a Job's own limit would count the time in which no node was free, too.
    """
    spec: dict[str, object] = {}
    if request.time_s:
        spec["activeDeadlineSeconds"] = request.time_s - (request.signal_s or 0)
    if request.signal_s:
        spec["terminationGracePeriodSeconds"] = request.signal_s + 10  # the launcher ends after its ranks
    return spec


def _variables(request: JobRequest) -> list[dict[str, object]]:
    """Return the options of torchrun, and so of `numapin run`, as variables."""
    values = {"PET_NNODES": str(request.nodes), "PET_NPROC_PER_NODE": str(request.ranks)}
    if request.nodes == 1:
        return [{"name": name, "value": value} for name, value in values.items()]
    name = job_name(request)
    values |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{name}-0.{name}:{_PORT}"}
    if request.requeue:
        values["PET_MAX_RESTARTS"] = str(_RETRIES)
    given: list[dict[str, object]] = [{"name": name, "value": value} for name, value in values.items()]
    return [*given, _from_pod("PET_RDZV_ID", _JOB_UID), _from_pod("PET_LOCAL_ADDR", "status.podIP")]


def _from_pod(name: str, field: str) -> dict[str, object]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _pod(request: JobRequest, container: str, variables: list[dict[str, object]]) -> dict[str, object]:
    own = variables and request.nodes > 1
    start = "\n".join([shell.OPEN_FILES, *([_IS_HOST] if own else []), 'exec "$@"'])
    dataloader = ["--dataloader=numapin"] if request.dataloader else []
    grace = [f"--shutdown-timeout={request.signal_s}"] if request.signal_s else []
    arguments = ["numapin", "run", *grace, *request.options, *dataloader, *shell.run_command(request)]
    described: dict[str, object] = {
        "name": container,
        "image": in_registry(request.container or ""),
        "command": ["sh", "-c", _unexpanded(start), "sh"],
        "args": [_unexpanded(word) for word in arguments],
        **({"env": variables} if variables else {}),
        "resources": Noted(value=_resources(request), note=_CPUS),
    }
    if request.sys_nice:
        described["securityContext"] = Noted(value={"capabilities": {"add": ["SYS_NICE"]}}, note=_SYS_NICE)
    if request.dataloader:
        return {**_limits(request), "containers": [described]}
    described["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - the pod's own
    shm = Noted(value=[{"name": "shm", "emptyDir": {"medium": "Memory"}}], note=_SHM)
    return {**_limits(request), "containers": [described], "volumes": shm}


def _resources(request: JobRequest) -> dict[str, object]:
    amounts: dict[str, object] = {
        "cpu": request.cpus_per_task,
        "memory": f"{(request.memory_bytes or 0) >> 20}Mi",
        **({"nvidia.com/gpu": request.gpus_per_node} if request.gpus_per_node else {}),
    }
    return {"requests": amounts, "limits": amounts}


def _unexpanded(text: str) -> str:
    """Return text that Kubernetes leaves as it is: in commands and arguments it puts variables in for $(NAME)."""
    return re.sub(r"\$\$+|\$(?=\()", lambda dollars: dollars[0] * 2, text)


# --- YAML ------------------------------------------------------------------------------------------------------------


def yaml_document(value: Mapping[str, object]) -> str:
    """Return a mapping as a YAML document, starting with `---`, that YAML 1.1 and 1.2 readers take the same way."""
    from ruamel.yaml import YAML  # here: no other command needs it

    writer = YAML()
    writer.explicit_start = True
    writer.allow_unicode = False  # invisible characters are escaped
    writer.width = _NEVER_FOLDED
    text = StringIO()
    writer.dump(_yaml_node(value, column=0), text)
    return text.getvalue()


def _yaml_node(value: object, *, column: int) -> object:
    """Return a value as ruamel.yaml's types, with quotes and comments; `column` is where the keys of a mapping start.

    Nothing is shared between two nodes: the writer would make an anchor and an alias of it.
    """
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(value, list):
        return CommentedSeq([_yaml_node(item, column=_inner_column(item, column)) for item in value])
    if not isinstance(value, dict):
        return _yaml_scalar(value)
    node = CommentedMap()
    for key, item in value.items():
        name = _yaml_scalar(key)
        inner = item.value if isinstance(item, Noted) else item
        node[name] = _yaml_node(inner, column=_inner_column(inner, column))
        if isinstance(item, Noted):
            node.yaml_set_comment_before_after_key(name, before=item.note, indent=column)
    return node


def _inner_column(value: object, column: int) -> int:
    """Return the column of a value inside a mapping or sequence at `column`; only mappings are indented."""
    return column + (_INDENT if isinstance(value, dict) else 0)


def _yaml_scalar(value: object) -> object:
    """Return a string with quotes wherever a reader might take it for anything else; other values as they are."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if not isinstance(value, str):
        return value
    if _is_block(value):
        return LiteralScalarString(value)
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_PLAIN
    return value if is_plain else DoubleQuotedScalarString(value)


def _is_block(text: str) -> bool:
    """Return whether text can be written as it is: several lines of visible ASCII, none empty or ending in a space."""
    lines = text.split("\n")
    is_clean = all(line.strip() and line == line.rstrip() and line.isascii() and line.isprintable() for line in lines)
    return len(lines) > 1 and is_clean and not lines[0].startswith(" ")
