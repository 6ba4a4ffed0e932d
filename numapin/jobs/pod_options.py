"""The user's additions to the pods of a Kubernetes job.

`PodOptions` holds all of them, checked against each other. Names and amounts are the API server's to check.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from numapin.errors import UsageError

_SIZED_ELSEWHERE: Final = {
    "cpu": "--cpus-per-task N",
    "memory": "--mem-per-node SIZE",
    "nvidia.com/gpu": "--gpus-per-node N",
    "amd.com/gpu": "--gpus-per-node N",
    "gpu.intel.com/i915": "--gpus-per-node N",
}
SHM: Final = "/dev/shm"  # noqa: S108 - the pod's own


class VolumeKind(StrEnum):
    """The kinds of volumes, as the options name them."""

    PVC = "pvc"
    SECRET = "secret"  # noqa: S105 - the name of a kind
    CONFIGMAP = "configmap"
    EMPTYDIR = "emptydir"
    HOST = "host"


class PodSecurity(StrEnum):
    """The levels of Kubernetes' Pod Security Standards, which a namespace may enforce."""

    PRIVILEGED = "privileged"
    BASELINE = "baseline"
    RESTRICTED = "restricted"


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
    """The user's additions to pods. Raises UsageError if two of them contradict each other."""

    env: tuple[tuple[str, str], ...] = ()
    env_from: tuple[tuple[VolumeKind, str], ...] = ()  # secrets and config maps, each key of which becomes a variable
    volumes: tuple[Volume, ...] = ()
    resources: tuple[tuple[str, str], ...] = ()  # other than CPUs, memory and GPUs
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()  # of the job and of its pods
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None  # None: the namespace's default
    scheduler: str | None = None  # None: the cluster's default
    pod_security: PodSecurity = PodSecurity.PRIVILEGED
    seccomp_profile: str | None = None  # in the kubelet's folder of profiles; None: the container runtime's
    ipc_lock: bool = False
    ttl_s: int | None = None  # the time after which a finished job is deleted; None: never
    device_classes: tuple[str, ...] = ()  # DRA's, of the GPUs and of devices of which each GPU gets one; (): no DRA
    match_attribute: str | None = None  # that devices must share

    def __post_init__(self) -> None:
        """Check what concerns several options."""
        for option, names in (
            ("--env", [name for name, _ in self.env]),
            ("--volume", [volume.path for volume in self.volumes]),
            ("--resource", [name for name, _ in self.resources]),
            ("--node-selector", [name for name, _ in self.node_selector]),
            ("--annotation", [name for name, _ in self.annotations]),
            ("--pull-secret", self.pull_secrets),
            ("--device-class", self.device_classes),
        ):
            repeated = [name for name, count in Counter(names).items() if count > 1]
            if repeated:
                raise UsageError(f"{option} names {repeated[0]} twice", "give it once")
        of_host = [f"--volume {volume.name}:{volume.path}" for volume in self.volumes if volume.kind is VolumeKind.HOST]
        need_privileges = [*(["--ipc-lock"] if self.ipc_lock else []), *of_host]
        if need_privileges and self.pod_security is not PodSecurity.PRIVILEGED:
            raise UsageError(
                f"{need_privileges[0]} with --pod-security {self.pod_security}: the level refuses it",
                "leave one of them out",
            )
        if self.match_attribute and not self.device_classes:
            raise UsageError(
                f"--match-attribute {self.match_attribute} without --device-class: only claims can match it",
                "for example: --device-class gpu.nvidia.com",
            )


def pair(text: str, form: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE. The value may be empty and may contain anything but NUL."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not {form}")
    return name, value


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
    kind, name = None, source
    match source.partition("/"):
        case "", "/", _:
            kind = VolumeKind.HOST
        case VolumeKind.EMPTYDIR, "", _:
            kind, name = VolumeKind.EMPTYDIR, ""
        case (VolumeKind.PVC | VolumeKind.SECRET | VolumeKind.CONFIGMAP) as word, _, name if name:
            kind = VolumeKind(word)
    if kind is None or (has_mode and mode not in {"ro", "rw"}) or not path.startswith("/"):
        raise ValueError(
            f"{text!r} is not SOURCE:/PATH or SOURCE:/PATH:ro, where SOURCE is pvc/NAME, secret/NAME, configmap/NAME, "
            "emptydir, or a path of the host, such as pvc/datasets:/data:ro"
        )
    path = path.rstrip("/")
    if not path:
        raise ValueError(f"{text!r} would hide the whole image; name a folder in the pod, such as /data")
    return Volume(kind=kind, name=name, path=path, read_only=mode == "ro")


def resource(text: str) -> tuple[str, str]:
    """Return the name and the amount of NAME=AMOUNT. CPUs, memory and GPUs have options of their own."""
    form = "NAME=N, such as rdma/ib=1 or hugepages-2Mi=4Gi"
    name, amount = pair(text, form)
    if name in _SIZED_ELSEWHERE:
        raise ValueError(f"{name} has an option of its own: {_SIZED_ELSEWHERE[name]}")
    if not amount:
        raise ValueError(f"{text!r} is not {form}")
    return name, amount


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
