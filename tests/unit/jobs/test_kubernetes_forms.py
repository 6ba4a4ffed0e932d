"""Kubernetes' forms and the additions to pods: what each puts into the manifest, what is refused, and the schemas."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from tests.jobs import schemas
from tests.jobs.cases import expanded, refusal, write
from tests.unit.jobs.seam import SHM, KubernetesKind

if TYPE_CHECKING:
    from pathlib import Path

FORMS = [kind.value for kind in KubernetesKind]
SHAPE = ("--gpus-per-node", "4", "--cpus-per-task", "8", "--mem-per-node", "8G", "--container", "a")


def documents(*options: str, form: str = "job", nodes: int = 2) -> list[dict[str, Any]]:
    """Return the documents of a manifest, held against their schemas."""
    text = write(["kubernetes", "--form", form, "--nodes", str(nodes), *SHAPE, *options, "train.py"])
    found = list(yaml.safe_load_all(text))
    for document in found:
        schemas.require_valid(document)
    return found


def pod(*options: str, form: str = "job") -> dict[str, Any]:
    """Return the template of a pod."""
    return next(found for document in documents(*options, form=form) for found in schemas.pods(document))


def container(*options: str, form: str = "job") -> dict[str, Any]:
    """Return the only container of a pod."""
    (found,) = pod(*options, form=form)["spec"]["containers"]
    result: dict[str, Any] = found
    return result


# --- additions to pods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_every_addition(form: str) -> None:
    """One builder writes the pods of all forms, so an option that one form takes is in all of them."""
    spec = pod(
        *("--env", "A=b=c", "--env-from", "secret/wandb", "--env-from", "configmap/site"),
        *("--volume", "pvc/data:/data:ro", "--resource", "rdma/ib=1", "--resource", "hugepages-2Mi=4Gi"),
        *("--node-selector", "pool=gpu", "--toleration", "nvidia.com/gpu:NoSchedule", "--pull-secret", "registry"),
        *("--service-account", "me", "--annotation", "a.b/c=d e", "--ipc-lock", "--scheduler", "mine"),
        form=form,
    )
    assert spec["metadata"]["annotations"] == {"a.b/c": "d e"}
    spec = spec["spec"]
    (inside,) = spec["containers"]
    assert {"name": "A", "value": "b=c"} in inside["env"]
    assert inside["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"configMapRef": {"name": "site"}}]
    assert inside["resources"]["limits"].items() >= {"rdma/ib": 1, "hugepages-2Mi": "4Gi"}.items()
    assert inside["resources"]["limits"] == inside["resources"]["requests"]
    assert inside["securityContext"]["capabilities"]["add"] == ["SYS_NICE", "IPC_LOCK"]
    assert {"name": "volume-0", "mountPath": "/data", "readOnly": True} in inside["volumeMounts"]
    claim = {"claimName": "data", "readOnly": True}
    assert {"name": "volume-0", "persistentVolumeClaim": claim} in spec["volumes"]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["serviceAccountName"], spec["schedulerName"]) == ("me", "mine")


@pytest.mark.parametrize("form", FORMS)
def test_annotations_and_the_queue_are_on_the_job_too(form: str) -> None:
    """Kueue reads the label of the job, and exclusive placement the job's annotation."""
    job = documents("--queue", "team", "--annotation", "a.b/c=d", form=form)[-1]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert job["metadata"]["annotations"] == {"a.b/c": "d"}


@pytest.mark.parametrize(
    ("typed", "volume", "mount"),
    [
        ("pvc/data:/data", {"persistentVolumeClaim": {"claimName": "data"}}, {"mountPath": "/data"}),
        ("secret/key:/k/", {"secret": {"secretName": "key"}}, {"mountPath": "/k"}),
        ("configmap/a.b:/c:ro", {"configMap": {"name": "a.b"}}, {"mountPath": "/c", "readOnly": True}),
        ("emptydir:/scratch:rw", {"emptyDir": {}}, {"mountPath": "/scratch"}),
        (f"emptydir:{SHM}", {"emptyDir": {"medium": "Memory"}}, {"mountPath": SHM}),
        ("/mnt/nvme 0:/a b", {"hostPath": {"path": "/mnt/nvme 0"}}, {"mountPath": "/a b"}),
    ],
)
def test_volumes(typed: str, volume: dict[str, Any], mount: dict[str, Any]) -> None:
    """Each source becomes its kind of volume. The user's own /dev/shm replaces numapin's."""
    spec = pod("--volume", typed)["spec"]
    assert spec["volumes"][-1] == {"name": "volume-0"} | volume
    mounts = spec["containers"][0]["volumeMounts"]
    assert mounts[-1] == {"name": "volume-0"} | mount
    assert [entry["mountPath"] for entry in mounts].count(SHM) == 1


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("gpu", {"key": "gpu", "operator": "Exists"}),
        ("a.b/gpu:NoExecute", {"key": "a.b/gpu", "operator": "Exists", "effect": "NoExecute"}),
        ("gpu=yes", {"key": "gpu", "operator": "Equal", "value": "yes"}),
        ("gpu=:NoSchedule", {"key": "gpu", "operator": "Equal", "value": "", "effect": "NoSchedule"}),
    ],
)
def test_tolerations(typed: str, written: dict[str, str]) -> None:
    """A key without a value tolerates every value, and without an effect every effect."""
    assert pod("--toleration", typed)["spec"]["tolerations"] == [written]


@pytest.mark.parametrize("value", ["", "$(PATH)", "$$", "a\nb", "ünï 🜁", "no", "1e3", '"', "-"])
def test_the_value_of_a_variable_arrives_as_it_was_typed(value: str) -> None:
    """Kubernetes expands nothing in it, and YAML does not take it for another type."""
    (written,) = [entry["value"] for entry in container("--env", f"A={value}")["env"] if entry["name"] == "A"]
    assert expanded(written) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--env", "A"), "'A' is not NAME=VALUE, such as NCCL_DEBUG=INFO"),
        (("--env", "=b"), "'=b' is not NAME=VALUE"),
        (("--env", "A=1", "--env", "A=2"), "--env names A twice"),
        (("--env", "A=\udcff"), "is not text"),
        (("--env", "ROLE_RANK=1"), "--env ROLE_RANK: numapin sets"),
        (("--env", "TORCHELASTIC_RUN_ID=1"), "--env TORCHELASTIC_RUN_ID: numapin sets"),
        (("--env", "PET_NNODES=3"), "--env PET_NNODES: the manifest sets this variable itself"),
        (("--env", "PET_RDZV_ID=3"), "--env PET_RDZV_ID: the manifest sets this variable itself"),
        (("--env-from", "wandb"), "'wandb' is neither secret/NAME nor configmap/NAME"),
        (("--env", "NUMAPIN_BINDING=5"), "--env NUMAPIN_BINDING: numapin sets this variable itself"),
        (("--env-from", "secret/"), "'secret/' is neither secret/NAME nor configmap/NAME"),
        (("--env", "LOCAL_RANK=0"), "--env LOCAL_RANK: numapin sets this variable itself, for each rank"),
        (("--pull-secret", "a", "--pull-secret", "a"), "--pull-secret names a twice"),
        (("--volume", "pvc/data:/"), "'pvc/data:/' would hide the whole image; name a folder in the pod"),
        (("--resource", "rdma/ib="), "is not NAME=N"),
        (("--queue", "team\n  a: b"), "--partition/--queue 'team\\n  a: b' is not valid"),
        (("--annotation", "\udcff=1"), "is not text"),
        (("--volume", "/\udcff:/data"), "is not text"),
        (("--volume", "data"), "'data' is not SOURCE:/PATH"),
        (("--volume", "data:/data"), "is not SOURCE:/PATH"),
        (("--volume", "pvc/data:data"), "is not SOURCE:/PATH"),
        (("--volume", "pvc/data:/data:rx"), "is not SOURCE:/PATH"),
        (("--volume", "pvc/:/data"), "is not SOURCE:/PATH"),
        (("--volume", "pvc/a:/data", "--volume", "pvc/b:/data/"), "--volume names /data twice"),
        (("--resource", "rdma/ib"), "'rdma/ib' is not NAME=N, such as rdma/ib=1"),
        (("--resource", "cpu=4"), "cpu has an option of its own: --cpus-per-task N"),
        (("--resource", "nvidia.com/gpu=4"), "--gpus-per-node N"),
        (("--resource", "a/b=1", "--resource", "a/b=2"), "--resource names a/b twice"),
        (("--node-selector", "pool"), "'pool' is not LABEL=VALUE"),
        (("--toleration", ""), "is not KEY[=VALUE][:EFFECT]"),
        (("--toleration", "gpu:"), "is not KEY[=VALUE][:EFFECT]"),
        (("--service-account", ""), "the name is empty"),
        (("--annotation", "a"), "'a' is not NAME=VALUE"),
        (("--gang", "kueue"), "kueue"),
        (("--ttl", "soon"), "'soon' is not a time; write 24h or 90m"),
        (("--match-attribute", "a.b/c"), "--match-attribute a.b/c without --device-class"),
        (("--device-class", "gpu", "--device-class", "gpu"), "--device-class names gpu twice"),
        (("--device-class", "gpu", "--gpus-per-node", "0"), "--device-class gpu: the job has no GPUs"),
        (
            ("--device-class", "a", "--device-class", "b", "--gpus-per-node", "17"),
            "17 GPUs, each with a device of every class, are 34 devices",
        ),
        (("--form", "trainjob", "--ttl", "1h"), "--ttl with --form trainjob: Kubeflow Trainer does not delete"),
        (("--form", "leaderworkerset", "--time", "1h"), "a LeaderWorkerSet runs until it is deleted"),
        (("--form", "leaderworkerset", "--ttl", "1h"), "a LeaderWorkerSet runs until it is deleted"),
        (("--form", "leaderworkerset", "--requeue"), "always starts its pods again"),
        (("--form", "leaderworkerset", "--gang", "coscheduling"), "for Volcano only"),
        (("--form", "mpijob"), "mpijob"),
    ],
)
def test_malformed_additions_are_refused_and_write_no_file(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """The error names the value and the form expected, and nothing is written."""
    words = ["kubernetes", *SHAPE, "--nodes", "2", "--output", str(tmp_path / "job.yaml"), *options, "train.py"]
    assert message in refusal(words)
    assert list(tmp_path.iterdir()) == []


# --- forms -----------------------------------------------------------------------------------------------------------


def _variables(part: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in part.get("env", [])}


def test_pods_of_a_jobset_find_the_first_one() -> None:
    """The endpoint is the name that the JobSet's Service gives to the first pod."""
    (document,) = documents(form="jobset")
    (replicated,) = document["spec"]["replicatedJobs"]
    given = _variables(container(form="jobset"))
    name = f"{document['metadata']['name']}-{replicated['name']}-0-0.{document['metadata']['name']}"
    assert given["PET_RDZV_ENDPOINT"] == f"{name}:29500"
    assert (given["PET_NNODES"], given["PET_NPROC_PER_NODE"]) == ("2", "4")
    assert replicated["template"]["spec"]["completions"] == 2


def test_a_jobset_restarts_all_its_pods() -> None:
    """With --requeue a failed pod fails the Job at once, and the JobSet starts all pods again."""
    (document,) = documents("--requeue", form="jobset")
    spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["backoffLimit"], document["spec"]["failurePolicy"]["maxRestarts"]) == (0, 3)
    (rule,) = document["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    (plain,) = documents(form="jobset")
    assert "failurePolicy" not in plain["spec"]


def test_a_trainjob_brings_its_runtime() -> None:
    """The runtime holds the pods under the names that the Trainer requires; its torch policy sets PET_NNODES."""
    runtime, job = documents(form="trainjob")
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == container(form="trainjob")["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 4}
    assert not [name for name in _variables(container(form="trainjob")) if name in {"PET_NNODES", "PET_NODE_RANK"}]


def test_the_pods_of_a_leaderworkerset_meet_in_their_group() -> None:
    """The endpoint is the leader of the pod's own group, so that the set can be scaled."""
    (document,) = documents(form="leaderworkerset")
    assert (document["spec"]["replicas"], document["spec"]["leaderWorkerTemplate"]["size"]) == (1, 2)
    start = container(form="leaderworkerset")["command"][2]
    assert 'PET_RDZV_ENDPOINT="$LWS_LEADER_ADDRESS:29500"' in start
    assert "is_host=$$((LWS_WORKER_INDEX == 0))" in start
    assert "restartPolicy" not in pod(form="leaderworkerset")["spec"]  # a StatefulSet takes no other than Always


@pytest.mark.parametrize("form", FORMS)
def test_one_host_needs_no_rendezvous(form: str) -> None:
    """A job of one pod has no endpoint and no Service."""
    found = documents(form=form, nodes=1)
    assert [document["kind"] for document in found if document["kind"] == "Service"] == []
    assert "RDZV" not in str(found)


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_finished_jobs_are_deleted(form: str) -> None:
    """--ttl is where the controller looks for it."""
    assert documents("--ttl", "2h", form=form)[-1]["spec"]["ttlSecondsAfterFinished"] == 7200


@pytest.mark.parametrize("form", ["job", "jobset"])
@pytest.mark.parametrize(
    ("gang", "api", "where", "key"),
    [
        ("coscheduling", "scheduling.x-k8s.io/v1alpha1", "labels", "scheduling.x-k8s.io/pod-group"),
        ("volcano", "scheduling.volcano.sh/v1beta1", "annotations", "scheduling.k8s.io/group-name"),
    ],
)
def test_a_gang_is_a_group_of_all_pods(form: str, gang: str, api: str, where: str, key: str) -> None:
    """The group has as many members as the job has pods, and each pod names it."""
    found = documents("--gang", gang, form=form)
    (group,) = [document for document in found if document["kind"] == "PodGroup"]
    assert (group["apiVersion"], group["spec"]) == (api, {"minMember": 2})
    template = pod("--gang", gang, form=form)
    assert template["metadata"][where] == {key: group["metadata"]["name"]}
    assert template["spec"].get("schedulerName") == ("volcano" if gang == "volcano" else None)


def test_the_operators_make_their_gangs_themselves() -> None:
    """A TrainJob and a LeaderWorkerSet have no PodGroup in the manifest."""
    runtime, _ = documents("--gang", "volcano", form="trainjob")
    assert runtime["spec"]["podGroupPolicy"] == {"volcano": {}}
    (group,) = documents("--gang", "volcano", form="leaderworkerset")
    assert group["kind"] == "LeaderWorkerSet"


# --- DRA -------------------------------------------------------------------------------------------------------------

_ATTRIBUTE = "resource.kubernetes.io/pcieRoot"


@pytest.mark.parametrize("form", FORMS)
def test_claimed_gpus_are_no_extended_resource(form: str) -> None:
    """With a device class a pod claims its GPUs, and asks for none of the device plugin's."""
    found = documents("--device-class", "gpu.nvidia.com", form=form)
    (claims,) = [document for document in found if document["kind"] == "ResourceClaimTemplate"]
    spec = pod("--device-class", "gpu.nvidia.com", form=form)["spec"]
    (reference,) = spec["resourceClaims"]
    assert reference["resourceClaimTemplateName"] == claims["metadata"]["name"]
    resources = spec["containers"][0]["resources"]
    assert resources["claims"] == [{"name": reference["name"]}]
    assert not [name for name in resources["limits"] if "gpu" in name]
    (request,) = claims["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "count": 4}


def test_each_gpu_gets_its_own_nic() -> None:
    """With two classes there is a pair of requests per GPU, and each pair shares the attribute."""
    options = ("--device-class", "gpu.nvidia.com", "--device-class", "dranet", "--match-attribute", _ATTRIBUTE)
    devices = documents(*options)[0]["spec"]["spec"]["devices"]
    assert [request["name"] for request in devices["requests"][:4]] == ["gpu-0", "device-1-0", "gpu-1", "device-1-1"]
    assert len(devices["requests"]) == 8
    expected = [{"requests": [f"gpu-{n}", f"device-1-{n}"], "matchAttribute": _ATTRIBUTE} for n in range(4)]
    assert devices["constraints"] == expected


def test_gpus_of_one_class_share_the_attribute() -> None:
    """With one class the attribute is the same for all GPUs of a pod."""
    devices = documents("--device-class", "gpu.nvidia.com", "--match-attribute", _ATTRIBUTE)[0]["spec"]["spec"][
        "devices"
    ]
    assert devices["constraints"] == [{"requests": ["gpu"], "matchAttribute": _ATTRIBUTE}]


# --- the schemas themselves ------------------------------------------------------------------------------------------

_PARTS = {
    "job": ("Job", ("spec",)),
    "jobset": ("JobSet", ("spec", "replicatedJobs", 0)),
    "trainjob": ("TrainJob", ("spec", "trainer")),
    "leaderworkerset": ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate")),
}


def _part(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@pytest.mark.parametrize("form", FORMS)
def test_the_schemas_find_wrong_fields(form: str) -> None:
    """A misspelled field and a wrong type are found in each kind."""
    kind, path = _PARTS[form]
    (good,) = [document for document in documents(form=form) if document["kind"] == kind]
    misspelled = copy.deepcopy(good)
    _part(misspelled, path)["numNode"] = 2
    mistyped = copy.deepcopy(good)
    name = next(iter(_part(mistyped, path)))
    _part(mistyped, path)[name] = {"a": 1}
    for wrong in (misspelled, mistyped, good | {"spec": "a"}):
        with pytest.raises(jsonschema.ValidationError):
            schemas.require_valid(wrong)


@pytest.mark.parametrize("form", FORMS)
def test_the_schemas_find_wrong_fields_of_pods(form: str) -> None:
    """A wrong field of the container is found at any depth."""
    found = documents(form=form)
    template = next(part for document in found for part in schemas.pods(document))
    template["spec"]["containers"][0]["commands"] = ["true"]
    (wrong,) = [document for document in found if any(True for _ in schemas.pods(document))]
    with pytest.raises(jsonschema.ValidationError):
        schemas.require_valid(wrong)


def test_the_schemas_find_wrong_claims_and_groups() -> None:
    """The same holds for what stands beside the job."""
    found = documents("--gang", "volcano", "--device-class", "gpu.nvidia.com", "--match-attribute", _ATTRIBUTE)
    claims, _, group, _ = found
    claims["spec"]["spec"]["devices"]["constraints"][0]["matchAttributes"] = "a"
    group["spec"]["minMembers"] = 2
    for wrong in (claims, group):
        with pytest.raises(jsonschema.ValidationError):
            schemas.require_valid(wrong)
