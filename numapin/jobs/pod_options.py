"""The user's additions to the pods of a Kubernetes job.

`PodOptions` holds all of them, checked against each other. Names and amounts are the API server's to check.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME: Final = itemgetter(0)
_SIZED_ELSEWHERE: Final = {
    "cpu": "--cpus-per-task N",
    "memory": "--mem-per-node SIZE",
    "nvidia.com/gpu": "--gpus-per-node N",
    "amd.com/gpu": "--gpus-per-node N",
    "gpu.intel.com/i915": "--gpus-per-node N",
}
_MAX_DEVICES: Final = 32  # of a ResourceClaim (AllocationResultsMaxSize of resource.k8s.io/v1)
SHM: Final = "/dev/shm"  # noqa: S108 - the pod's own


class VolumeKind(StrEnum):
    """The kinds of volumes, as the options name them."""

    PVC = "pvc"
    SECRET = "secret"  # noqa: S105 - the name of a kind
    CONFIGMAP = "configmap"
    EMPTYDIR = "emptydir"
    HOST = "host"


class Gang(StrEnum):
    """The schedulers that place all pods of a job at once or none."""

    COSCHEDULING = "coscheduling"
    VOLCANO = "volcano"


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A volume and its only mount. `name` is an object's name, or a path of the host."""

    kind: VolumeKind
    name: str
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint that pods tolerate. Without a value: every value; without an effect: every effect."""

    key: str
    value: str | None = None
    effect: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """The user's additions to pods. Raises UsageError if two of them contradict each other.

    Attributes:
        env: Variables and their values.
        env_from: Secrets and config maps, each key of which becomes a variable.
        volumes: Volumes with their mounts.
        resources: Names and amounts of other resources than CPUs, memory and GPUs.
        node_selector: Labels that a node must have.
        tolerations: Taints that pods tolerate.
        annotations: Annotations of the job and of its pods.
        pull_secrets: Secrets for the image's registry.
        service_account: The account of the pods. None: the namespace's default.
        scheduler: The scheduler's name. None: the cluster's default, or Volcano for its gangs.
        gang: The scheduler that starts all pods or none. None: pods are scheduled one by one.
        ipc_lock: Whether pods may lock memory without limit.
        ttl_s: The time after which a finished job is deleted. None: never.
        device_classes: The GPUs' DRA device class, and those of devices of which each GPU gets one. Empty: no DRA.
        match_attribute: The attribute that devices must share. None: any devices.
    """

    env: tuple[tuple[str, str], ...] = ()
    env_from: tuple[tuple[VolumeKind, str], ...] = ()
    volumes: tuple[Volume, ...] = ()
    resources: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    scheduler: str | None = None
    gang: Gang | None = None
    ipc_lock: bool = False
    ttl_s: int | None = None
    device_classes: tuple[str, ...] = ()
    match_attribute: str | None = None

    def __post_init__(self) -> None:
        """Check what concerns several options."""
        _require_once("--env", map(_NAME, self.env))
        _require_once("--volume", [volume.path for volume in self.volumes])
        _require_once("--resource", map(_NAME, self.resources))
        _require_once("--node-selector", map(_NAME, self.node_selector))
        _require_once("--annotation", map(_NAME, self.annotations))
        _require_once("--pull-secret", self.pull_secrets)
        _require_once("--device-class", self.device_classes)
        if self.match_attribute and not self.device_classes:
            raise UsageError(
                f"--match-attribute {self.match_attribute} without --device-class: only claims can match it",
                "for example: --device-class gpu.nvidia.com",
            )

    @property
    def has_shm(self) -> bool:
        """Return whether one of the user's volumes is at /dev/shm."""
        return any(volume.path == SHM for volume in self.volumes)

    def require_claimable(self, gpus: int) -> None:
        """Raise UsageError if the devices of a pod with so many GPUs do not fit one ResourceClaim."""
        classes = self.device_classes
        if not classes:
            return
        if gpus == 0:
            raise UsageError(f"--device-class {classes[0]}: the job has no GPUs", "give --gpus-per-node N")
        if gpus * len(classes) > _MAX_DEVICES:
            raise UsageError(
                f"--device-class: {gpus} GPUs, each with a device of every class, are {gpus * len(classes)} devices; a "
                f"ResourceClaim has at most {_MAX_DEVICES}",
                "give fewer classes, or write the claims yourself",
            )


def _require_once(option: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{option} names {name} twice", "give it once")
        seen.add(name)


def variable(text: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE. The value may be empty and may contain anything but NUL."""
    return _pair(text, "NAME=VALUE, such as NCCL_DEBUG=INFO")


def variables_of(text: str) -> tuple[VolumeKind, str]:
    """Return the object whose keys become variables: secret/NAME or configmap/NAME."""
    kind, _, name = text.partition("/")
    if kind not in {VolumeKind.SECRET, VolumeKind.CONFIGMAP} or not name:
        raise ValueError(f"{text!r} is neither secret/NAME nor configmap/NAME, such as secret/wandb")
    return VolumeKind(kind), name


def volume(text: str) -> Volume:
    """Return the volume of SOURCE:PATH or SOURCE:PATH:ro. Raises ValueError."""
    source, _, rest = text.partition(":")
    path, has_mode, mode = rest.partition(":")
    is_mode = not has_mode or mode in {"ro", "rw"}
    named = _volume_source(source)
    if named is None or not is_mode or not path.startswith("/"):
        raise ValueError(
            f"{text!r} is not SOURCE:/PATH or SOURCE:/PATH:ro, where SOURCE is pvc/NAME, secret/NAME, configmap/NAME, "
            "emptydir, or a path of the host, such as pvc/datasets:/data:ro"
        )
    path = path.rstrip("/")
    if not path:
        raise ValueError(f"{text!r} would hide the whole image; name a folder in the pod, such as /data")
    kind, name = named
    return Volume(kind=kind, name=name, path=path, read_only=mode == "ro")


def _volume_source(source: str) -> tuple[VolumeKind, str] | None:
    """Return the kind and the name of a source; None for another form."""
    if source.startswith("/"):
        return VolumeKind.HOST, source
    if source == VolumeKind.EMPTYDIR:
        return VolumeKind.EMPTYDIR, ""
    kind, _, name = source.partition("/")
    is_named = kind in {VolumeKind.PVC, VolumeKind.SECRET, VolumeKind.CONFIGMAP} and bool(name)
    return (VolumeKind(kind), name) if is_named else None


def resource(text: str) -> tuple[str, str]:
    """Return the name and the amount of NAME=AMOUNT. CPUs, memory and GPUs have options of their own."""
    form = "NAME=N, such as rdma/ib=1 or hugepages-2Mi=4Gi"
    name, amount = _pair(text, form)
    if name in _SIZED_ELSEWHERE:
        raise ValueError(f"{name} has an option of its own: {_SIZED_ELSEWHERE[name]}")
    if not amount:
        raise ValueError(f"{text!r} is not {form}")
    return name, amount


def node_label(text: str) -> tuple[str, str]:
    """Return the name and the value of LABEL=VALUE. The value may be empty."""
    return _pair(text, "LABEL=VALUE, such as node.kubernetes.io/instance-type=p5.48xlarge")


def annotation(text: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE. The value may contain anything but NUL."""
    return _pair(text, "NAME=VALUE, such as k8s.v1.cni.cncf.io/networks=ib0")


def toleration(text: str) -> Toleration:
    """Return the toleration of KEY[=VALUE][:EFFECT]."""
    taint, has_effect, effect = text.partition(":")
    key, has_value, value = taint.partition("=")
    if not key or (has_effect and not effect):
        raise ValueError(f"{text!r} is not KEY[=VALUE][:EFFECT], such as nvidia.com/gpu:NoSchedule")
    return Toleration(key=key, value=value if has_value else None, effect=effect or None)


def word(text: str) -> str:
    """Return a name as it was typed. Raises ValueError if it is empty."""
    if not text:
        raise ValueError("the name is empty")
    return text


def _pair(text: str, form: str) -> tuple[str, str]:
    """Return the two parts around the first equals sign."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not {form}")
    return name, value
