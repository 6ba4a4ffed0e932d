"""The forms of a Kubernetes job, one function each. Pure.

Comes in: a `JobRequest` and the job's name. Goes out: the documents of the manifest: the job, and what it needs beside
it. Each pod is one host's part of the job and runs `numapin run`, which reads PET_* variables as torchrun does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.not_none import without_none
from numapin.jobs.manifest import Noted
from numapin.jobs.pod import PodForm, from_pod, named, template
from numapin.jobs.pod_options import Gang

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.jobs.request import JobRequest

_RETRIES: Final = 3
_PORT: Final = 29500
_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
# Signs the rendezvous: it is random, the same in all pods of a Job, and new for each Job.
_JOB_UID: Final = "metadata.labels['controller-uid']"
_IS_HOST: Final = 'export PET_RDZV_CONF="is_host=$((JOB_COMPLETION_INDEX == 0))"'
# The controller sets LWS_* in each pod. Each group is a job of its own.
_LWS_EXPORTS: Final = (
    f'export PET_RDZV_ENDPOINT="$LWS_LEADER_ADDRESS:{_PORT}"',
    'export PET_RDZV_CONF="is_host=$((LWS_WORKER_INDEX == 0))"',
)
_NODE: Final = "node"  # Kubeflow Trainer requires this name of the container and of the replicated job
_TRAINER_STEP: Final = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_DISRUPTED: Final = [{"type": "DisruptionTarget", "status": "True"}]
_POD_GROUPS: Final = {
    Gang.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
    Gang.VOLCANO: "scheduling.volcano.sh/v1beta1",
}


def job(request: JobRequest, name: str) -> list[dict[str, object]]:
    """Return an Indexed Job, with the headless Service by which its pods find each other."""
    is_one_host = request.nodes == 1
    form = PodForm(
        container="worker",
        variables=_variables(request, f"{name}-0.{name}", max_restarts=_retries(request)),
        exports=() if is_one_host else (_IS_HOST,),
        restart_policy="Never",
        subdomain=None if is_one_host else name,
        labels=_gang_labels(request, name),
        annotations=_gang_annotations(request, name),
    )
    policy = Noted(
        value={"rules": [{"action": "Ignore", "onPodConditions": _DISRUPTED}]},
        note="A pod that was evicted or preempted is restarted, and not counted as failed.",
    )
    spec = {
        **_indexed(request),
        "backoffLimit": _retries(request) * request.nodes,
        "podFailurePolicy": policy if request.requeue else None,
        "ttlSecondsAfterFinished": request.pod.ttl_s,
        "template": template(request, name, form),
    }
    services = [] if is_one_host else [_service(name)]
    return [*services, *_pod_group(request, name), _document("batch/v1", "Job", _metadata(request, name), spec)]


def jobset(request: JobRequest, name: str) -> list[dict[str, object]]:
    """Return a JobSet of one Indexed Job. Its controller makes the Service, and restarts all pods together."""
    form = PodForm(
        container=_NODE,
        variables=_variables(request, f"{name}-{_NODE}-0-0.{name}", max_restarts=0),
        exports=() if request.nodes == 1 else (_IS_HOST,),
        restart_policy="Never",
        labels=_gang_labels(request, name),
        annotations=_gang_annotations(request, name),
    )
    job_spec = {**_indexed(request), **_fail_at_once(request), "template": template(request, name, form)}
    spec = {
        "ttlSecondsAfterFinished": request.pod.ttl_s,
        "failurePolicy": _restart_all(request),
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": without_none(job_spec)}}],
    }
    document = _document("jobset.x-k8s.io/v1alpha2", "JobSet", _metadata(request, name), spec)
    return [*_pod_group(request, name), document]


def trainjob(request: JobRequest, name: str) -> list[dict[str, object]]:
    """Return a TrainJob of Kubeflow Trainer v2, with a TrainingRuntime that holds its pods.

    A TrainJob by itself cannot say all that the pods need: its patches changed their name and their fields between
    releases of the Trainer. The Trainer's torch policy sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
    PET_MASTER_ADDR and PET_MASTER_PORT.
    """
    identity = [from_pod("PET_RDZV_ID", _JOB_UID)] if request.nodes > 1 else []
    form = PodForm(container=_NODE, variables=identity, restart_policy="Never")
    job_spec = {**_fail_at_once(request), "template": template(request, name, form)}
    replicated = {
        "name": _NODE,
        "replicas": 1,
        "template": {"metadata": {"labels": _TRAINER_STEP}, "spec": without_none(job_spec)},
    }
    gang = request.pod.gang
    runtime_spec: dict[str, object] = {
        "mlPolicy": {"numNodes": request.nodes, "torch": {}},
        "podGroupPolicy": {gang.value: {}} if gang else None,
        "template": {
            "spec": without_none({"failurePolicy": _restart_all(request), "replicatedJobs": [replicated]}),
        },
    }
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": request.nodes, "numProcPerNode": request.num_ranks},
    }
    api = "trainer.kubeflow.org/v1alpha1"
    return [
        _document(api, "TrainingRuntime", {"name": name}, runtime_spec),
        _document(api, "TrainJob", _metadata(request, name), spec),
    ]


def leaderworkerset(request: JobRequest, name: str) -> list[dict[str, object]]:
    """Return a LeaderWorkerSet of one group of pods, which run until the set is deleted."""
    values = _of_torchrun(request)
    if request.nodes > 1:
        values["PET_RDZV_BACKEND"] = "c10d"
    address = [from_pod("PET_LOCAL_ADDR", "status.podIP")] if request.nodes > 1 else []
    form = PodForm(
        container="worker",
        variables=[*named(values), *address],
        exports=() if request.nodes == 1 else _LWS_EXPORTS,
    )
    group = {
        "size": request.nodes,
        "restartPolicy": Noted(
            value="RecreateGroupOnPodRestart", note="If a pod ends or restarts, all pods of its group start again."
        ),
        "workerTemplate": template(request, name, form),
    }
    spec = {
        "replicas": Noted(value=1, note=f"groups of pods: kubectl scale leaderworkerset {name} --replicas N"),
        "leaderWorkerTemplate": group,
    }
    return [_document("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _metadata(request, name), spec)]


def pytorchjob(request: JobRequest, name: str) -> list[dict[str, object]]:
    """Return a job of Kubeflow's legacy operator.

    It makes the Services, and sets PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and the other variables.
    """
    replica = {
        "restartPolicy": "OnFailure" if request.requeue else "Never",
        "template": template(request, name, PodForm(container="pytorch")),
    }
    replicas: dict[str, object] = {"Master": {"replicas": 1, **replica}}
    if request.nodes > 1:
        replicas["Worker"] = {"replicas": request.nodes - 1, **replica}
    policy = {
        "backoffLimit": _retries(request),
        "cleanPodPolicy": "None",
        "ttlSecondsAfterFinished": request.pod.ttl_s,
        "schedulingPolicy": {"minAvailable": request.nodes} if request.pod.gang else None,
    }
    spec = {
        "nprocPerNode": str(request.num_ranks),
        "runPolicy": without_none(policy),
        "pytorchReplicaSpecs": replicas,
    }
    return [_document("kubeflow.org/v1", "PyTorchJob", _metadata(request, name), spec)]


def _document(api: str, kind: str, metadata: Mapping[str, object], spec: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": api, "kind": kind, "metadata": dict(metadata), "spec": without_none(spec)}


def _metadata(request: JobRequest, name: str) -> dict[str, object]:
    labels = {_QUEUE_LABEL: request.queue} if request.queue else None
    return without_none({"name": name, "labels": labels, "annotations": dict(request.pod.annotations) or None})


def _service(name: str) -> dict[str, object]:
    spec = {
        "clusterIP": Noted(value="None", note=f"headless: gives each pod a name, such as {name}-0.{name}"),
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
    }
    return _document("v1", "Service", {"name": name}, spec)


def _indexed(request: JobRequest) -> dict[str, object]:
    return {"completions": request.nodes, "parallelism": request.nodes, "completionMode": "Indexed"}


def _retries(request: JobRequest) -> int:
    return _RETRIES if request.requeue else 0


def _fail_at_once(request: JobRequest) -> dict[str, object]:
    """Return the part of a Job in a JobSet that lets the JobSet restart it, and tell evictions from failures."""
    rules = [{"action": "FailJob", "onPodConditions": _DISRUPTED}]
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules} if request.requeue else None}


def _restart_all(request: JobRequest) -> dict[str, object] | None:
    """Return the JobSet's policy, for --requeue."""
    if not request.requeue:
        return None
    rule = {
        "name": "evicted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    note = "If a pod was evicted or preempted, all pods start again, and this is not counted."
    return {"maxRestarts": _RETRIES, "rules": Noted(value=[rule], note=note)}


def _of_torchrun(request: JobRequest) -> dict[str, str]:
    return {"PET_NNODES": str(request.nodes), "PET_NPROC_PER_NODE": str(request.num_ranks)}


def _variables(request: JobRequest, first: str, *, max_restarts: int) -> list[dict[str, object]]:
    """Return the options of torchrun, and so of `numapin run`, as variables. `first` is the first pod's name.

    `max_restarts` is how often launchers of other pods meet again after a pod was restarted alone.
    """
    values = _of_torchrun(request)
    if request.nodes == 1:
        return named(values)
    values |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{first}:{_PORT}"}
    if max_restarts:
        values["PET_MAX_RESTARTS"] = str(max_restarts)
    return [*named(values), from_pod("PET_RDZV_ID", _JOB_UID), from_pod("PET_LOCAL_ADDR", "status.podIP")]


def _gang_labels(request: JobRequest, name: str) -> dict[str, str]:
    """Return the label by which the coscheduling plugin finds the pods of a group."""
    return {"scheduling.x-k8s.io/pod-group": name} if request.pod.gang is Gang.COSCHEDULING else {}


def _gang_annotations(request: JobRequest, name: str) -> dict[str, str]:
    """Return the annotation by which Volcano finds the pods of a group."""
    return {"scheduling.k8s.io/group-name": name} if request.pod.gang is Gang.VOLCANO else {}


def _pod_group(request: JobRequest, name: str) -> list[dict[str, object]]:
    """Return the group whose pods are all placed at once, if a gang was requested."""
    gang = request.pod.gang
    return [_document(_POD_GROUPS[gang], "PodGroup", {"name": name}, {"minMember": request.nodes})] if gang else []
