"""Schemas of the manifests' documents: Kubernetes' own, Kubeflow's, and those of other projects' resources.

`require_valid` raises jsonschema's ValidationError for a field that the API of a document does not know, lacks, or
types otherwise.

Built-in kinds, and the pods inside all others, are held against Kubernetes' OpenAPI schemas (kubernetes-validate).
TrainJob, TrainingRuntime and JobSet are held against the models that Kubeflow Trainer releases (kubeflow-trainer-api,
Apache-2.0). For the others, fields.json lists fields and types, with their sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import referencing

_FIELDS: Final = Path(__file__).with_name("fields.json")
_MODELS: Final = {
    "trainer.kubeflow.org/v1alpha1 TrainJob": ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    "trainer.kubeflow.org/v1alpha1 TrainingRuntime": (
        "trainer_v1alpha1_training_runtime",
        "TrainerV1alpha1TrainingRuntime",
    ),
    "jobset.x-k8s.io/v1alpha2 JobSet": ("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
}
_BUILT_IN: Final = ("v1", "batch/v1", "resource.k8s.io/v1")
_TEMPLATES: Final = ("template", "workerTemplate", "leaderTemplate")
_POD: Final = {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}}}


def require_valid(document: dict[str, Any]) -> None:
    """Raise ValidationError if the document or a pod inside it does not fit its schema; unknown fields are errors."""
    if document["apiVersion"] in _BUILT_IN:
        _validate(document)
    else:
        _custom(f"{document['apiVersion']} {document['kind']}").validate(document)
    for pod in pods(document):
        metadata = {"name": "a", **pod.get("metadata", {})}
        spec = {key: value for key, value in pod["spec"].items() if key != "subdomain"}  # a controller sets it
        _validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def pods(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        for key, value in part.items():
            if key in _TEMPLATES and "containers" in value.get("spec", {}):
                yield value
            else:
                yield from pods(value)
    elif isinstance(part, list):
        for item in part:
            yield from pods(item)


@cache
def versions() -> tuple[str, str]:
    """Return the oldest and the newest version of Kubernetes whose schemas are at hand."""
    known = kubernetes_validate.utils.all_versions()
    return known[0], known[-1]


def _validate(document: dict[str, Any]) -> None:
    """Hold a built-in kind against the oldest and newest schemas; what is newer than the oldest, against the newest."""
    newer = ("resourceClaim", "backoffLimitPerIndex", "resource.k8s.io/v1")
    is_new = any(f'"{word}' in json.dumps(document) for word in newer)
    name = f"{document['kind'].lower()}-{document['apiVersion'].replace('batch/', 'batch-').replace('.k8s.io/', '-')}"
    for version in versions()[1:] if is_new else versions():
        _built_in(name, version).validate(document)


@cache
def _built_in(name: str, version: str) -> jsonschema.Draft202012Validator:
    """Return the strict validator of a built-in kind: that of kubernetes_validate, which reads its files each time."""
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    schema, definitions = (
        referencing.Resource.from_contents(kubernetes_validate.utils.schema_contents(f"{folder}/{file}.json", version))
        for file in (name, "_definitions")
    )
    registry = definitions @ (schema @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema.contents, registry=registry)


@cache
def _custom(kind: str) -> jsonschema.Draft202012Validator:
    if kind not in _MODELS:
        return jsonschema.Draft202012Validator(_listed(kind))
    module, name = _MODELS[kind]
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    return jsonschema.Draft202012Validator(_strict(model.model_json_schema(by_alias=True)))


def _strict(schema: Any) -> Any:
    """Return a schema in which objects with known properties have no others."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "actual_instance" in schema.get("properties", {}):  # the generator's wrapper around quantities and IntOrString
        return {"type": ["string", "number"]}
    strict = {key: _strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        strict["additionalProperties"] = False
    return strict


def _listed(kind: str) -> dict[str, Any]:
    spec = json.loads(_FIELDS.read_text())[kind]["spec"]
    metadata = {"type": "object", "properties": dict.fromkeys(("name", "labels", "annotations"), True)}
    fields = {
        "apiVersion": {},
        "kind": {},
        "metadata": metadata | {"additionalProperties": False},
        "spec": _typed(spec),
    }
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def _typed(listed: Any) -> dict[str, Any]:
    if listed == "pod":
        return _POD | {"additionalProperties": False, "required": ["spec"]}
    if isinstance(listed, str):
        return {"type": listed}
    if isinstance(listed, list):
        return {"enum": listed}
    return {
        "type": "object",
        "properties": {name.removesuffix("!"): _typed(value) for name, value in listed.items()},
        "required": [name.removesuffix("!") for name in listed if name.endswith("!")],
        "additionalProperties": False,
    }
