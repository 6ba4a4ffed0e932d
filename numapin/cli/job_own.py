"""The options of `numapin job` that one engine has by itself: Kubernetes' pods, Slurm's arrays. Edge.

Comes in: the texts of the options. Goes out: click's options, and their parsed values as `OwnOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from numapin.cli.options import BindingOptions, Parsed
from numapin.jobs import duration, pod_options, scripts
from numapin.jobs.pod_options import Gang, PodOptions
from numapin.jobs.request import KubernetesKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.jobs.pod_options import Toleration, Volume, VolumeKind


def _repeatable(option: str, metavar: str, parse: Callable[[str], object], text: str, name: str = "") -> click.Option:
    """Return an option that may be given several times; each value is parsed."""
    names = [option, name] if name else [option]
    return click.Option(names, multiple=True, type=Parsed(metavar, parse), metavar=metavar, help=f"{text} Repeatable.")


_KIND: Final = click.Option(
    ["--form", "kind"],
    type=click.Choice([kind.value for kind in KubernetesKind]),
    default=KubernetesKind.JOB.value,
    help="job: an Indexed Job with its Service (default). jobset: a JobSet. trainjob: Kubeflow Trainer v2. "
    "leaderworkerset: servers, which run until deleted.",
)
_SYS_NICE: Final = click.Option(
    ["--sys-nice/--no-sys-nice"], default=True, help="Let pods set memory policies (capability SYS_NICE; default: yes)."
)

KUBERNETES: Final = (
    _KIND,
    _repeatable("--env", "NAME=VALUE", pod_options.variable, "Variable of the pods, e.g. NCCL_DEBUG=INFO."),
    _repeatable(
        "--env-from",
        "secret/NAME",
        pod_options.variables_of,
        "Secret (secret/NAME) or config map (configmap/NAME) whose keys become variables, e.g. secret/wandb.",
    ),
    _repeatable(
        "--volume",
        "SOURCE:PATH[:ro]",
        pod_options.volume,
        "Volume to mount: pvc/NAME, secret/NAME, configmap/NAME, emptydir, or a path of the host, e.g. "
        "pvc/datasets:/data:ro.",
        "volumes",
    ),
    _repeatable("--resource", "NAME=N", pod_options.resource, "Another resource per pod, e.g. rdma/ib=1.", "resources"),
    _repeatable("--node-selector", "LABEL=VALUE", pod_options.node_label, "Label that nodes must have, e.g. pool=gpu."),
    _repeatable(
        "--toleration",
        "KEY[=VALUE][:EFFECT]",
        pod_options.toleration,
        "Taint that pods tolerate, e.g. nvidia.com/gpu:NoSchedule.",
        "tolerations",
    ),
    _repeatable("--pull-secret", "NAME", pod_options.word, "Secret for the image's registry.", "pull_secrets"),
    click.Option(
        ["--service-account"],
        type=Parsed("NAME", pod_options.word),
        metavar="NAME",
        help="Service account of the pods.",
    ),
    _repeatable(
        "--annotation",
        "NAME=VALUE",
        pod_options.annotation,
        "Annotation of the job and its pods, e.g. k8s.v1.cni.cncf.io/networks=ib0.",
        "annotations",
    ),
    click.Option(
        ["--gang"],
        type=click.Choice([gang.value for gang in Gang]),
        help="Place all pods at once or none, by this scheduler. Kueue (--queue) admits all or none without it.",
    ),
    click.Option(
        ["--scheduler"],
        type=Parsed("NAME", pod_options.word),
        metavar="NAME",
        help="Scheduler of the pods (default: the cluster's; volcano with --gang volcano).",
    ),
    _repeatable(
        "--device-class",
        "CLASS",
        pod_options.word,
        "Claim the GPUs by DRA from this device class, e.g. gpu.nvidia.com; each further class adds a device per GPU.",
        "device_classes",
    ),
    click.Option(
        ["--match-attribute"],
        type=Parsed("NAME", pod_options.word),
        metavar="NAME",
        help="Attribute that each GPU shares with its devices (with one class: that all GPUs of a pod share), e.g. "
        "resource.kubernetes.io/pcieRoot.",
    ),
    click.Option(
        ["--ttl"],
        type=Parsed("TIME", duration.parse, remedy="write 24h or 90m"),
        help="Delete the job this long after its end, e.g. 24h.",
    ),
    _SYS_NICE,
    click.Option(
        ["--ipc-lock/--no-ipc-lock"],
        default=False,
        help="Let pods lock memory without limit, for RDMA (capability IPC_LOCK; default: no).",
    ),
)

SLURM: Final = (
    click.Option(
        ["--array"],
        type=Parsed("INDICES", scripts.parse_array),
        metavar="INDICES",
        help="Submit a job array, e.g. 0-9 or 0-99%4; programs read SLURM_ARRAY_TASK_ID.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions(BindingOptions):
    """The parsed values of `KUBERNETES` and `SLURM`, by click's names, and of the binding options."""

    kind: str = KubernetesKind.JOB.value
    env: tuple[tuple[str, str], ...] = ()
    env_from: tuple[tuple[VolumeKind, str], ...] = ()
    volumes: tuple[Volume, ...] = ()
    resources: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    annotations: tuple[tuple[str, str], ...] = ()
    gang: str | None = None
    scheduler: str | None = None
    device_classes: tuple[str, ...] = ()
    match_attribute: str | None = None
    ttl: int | None = None
    sys_nice: bool = True
    ipc_lock: bool = False
    array: str | None = None

    def pod_options(self) -> PodOptions:
        """Return the additions to pods. Raises UsageError if two of them contradict each other."""
        return PodOptions(
            env=self.env,
            env_from=self.env_from,
            volumes=self.volumes,
            resources=self.resources,
            node_selector=self.node_selector,
            tolerations=self.tolerations,
            pull_secrets=self.pull_secrets,
            service_account=self.service_account,
            annotations=self.annotations,
            gang=Gang(self.gang) if self.gang else None,
            scheduler=self.scheduler,
            device_classes=self.device_classes,
            match_attribute=self.match_attribute,
            ttl_s=self.ttl,
            ipc_lock=self.ipc_lock,
        )
