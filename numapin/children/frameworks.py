"""Frameworks that bind their own processes: what switches this off, and what switches it on.

Options that bind a process before it sets its device, such as vLLM's --numa-bind, are not listed: numapin replaces that
binding.

A new framework is a row of FRAMEWORKS, with its source, and a row of the table in docs/guides/frameworks.md, which has
the versions that were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence


class Framework(NamedTuple):
    """A framework that binds its processes.

    Attributes:
        name: Its name in messages.
        module: Its package. A process that has imported it runs the framework.
        off: Variables that switch off a binding that is on by default, with the value that does, 0 or 1.
        on: Variables that switch on a binding that is off by default.
        is_last: Its binding comes after the process has set its device, and so after numapin's.
    """

    name: str
    module: str
    off: Mapping[str, str] = {}
    on: Sequence[str] = ()
    is_last: bool = False


FRAMEWORKS: Final = (
    # sglang/srt/environ.py, sglang/srt/utils/numa_utils.py: below numactl, on by default since 0.5.18.
    Framework("SGLang", "sglang", off={"SGLANG_AUTO_NUMA_BIND": "0"}, on=("SGLANG_SET_CPU_AFFINITY",)),
    # docs/source/deployment-guide/configuring-cpu-affinity.md: without the variable, it removes any other binding.
    # tensorrt_llm/executor/base_worker.py: right after set_device.
    Framework("TensorRT-LLM", "tensorrt_llm", off={"TLLM_NUMA_AWARE_WORKER_AFFINITY": "0"}, is_last=True),
    # nemo_rl/distributed/numa_utils.py; nemo_rl/models: some workers call it after set_device.
    Framework("NeMo RL", "nemo_rl", off={"NRL_DISABLE_NUMA_BINDING": "1"}, is_last=True),
    # accelerate/utils/launch.py sets it for --enable_cpu_affinity; accelerate/state.py: after set_device.
    Framework("Accelerate", "accelerate", on=("ACCELERATE_CPU_AFFINITY",), is_last=True),
)


def variables() -> dict[str, str]:
    """Return the variables that switch off what frameworks bind by default. Other programs ignore them."""
    return {name: value for framework in FRAMEWORKS for name, value in framework.off.items()}


def bind_themselves(modules: Container[str], environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each framework among a process's modules whose binding a variable has switched on."""
    found = []
    for framework in FRAMEWORKS:
        default = {**dict.fromkeys(framework.on, "0"), **framework.off}
        settings = [
            f"{name}={environ[name]}"
            for name, value in default.items()
            if name in environ and _is_true(environ[name]) != _is_true(value)
        ]
        if settings and framework.module in modules:
            which = "which replaces numapin's binding" if framework.is_last else "and numapin replaces that binding"
            found.append(f"{framework.name} binds its processes itself ({', '.join(settings)}), {which}")
    return found


def switched_off(modules: Container[str], environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each framework among a process's modules whose binding is switched off."""
    why = "because numapin binds its processes; a value that you set yourself is kept"
    return [
        f"{framework.name}'s own binding is off ({name}={value}), {why}"
        for framework in FRAMEWORKS
        for name, value in framework.off.items()
        if framework.module in modules and environ.get(name) == value
    ]


def _is_true(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "y", "on")
