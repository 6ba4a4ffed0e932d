"""Frameworks that bind their own processes: what switches this off, and what switches it on.

A new framework is a row of FRAMEWORKS, with its source, and a row of the table in docs/guides/frameworks.md, which has
the versions that were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence


class Framework(NamedTuple):
    """A framework that binds its processes.

    Attributes:
        name: Its name in messages.
        module: Its package. A process that has imported it runs the framework, and a command line that contains the
            word starts it.
        off: Variables that switch off a binding that is on by default, with the value that does, 0 or 1.
        on: Options, written with hyphens, and variables that switch on a binding that is off by default.
        is_last: Its binding comes after the process has set its device, and so after numapin's.
    """

    name: str
    module: str
    off: Mapping[str, str] = {}
    on: Sequence[str] = ()
    is_last: bool = False


FRAMEWORKS: Final = (
    # vllm/utils/numa_utils.py: the engine and the workers start below numactl.
    Framework("vLLM", "vllm", on=("--numa-bind", "--numa-bind-nodes", "--numa-bind-cpus")),
    # sglang/srt/environ.py, sglang/srt/utils/numa_utils.py: as vLLM, but on by default since 0.5.18.
    Framework("SGLang", "sglang", off={"SGLANG_AUTO_NUMA_BIND": "0"}, on=("--numa-node", "SGLANG_SET_CPU_AFFINITY")),
    # docs/source/deployment-guide/configuring-cpu-affinity.md: without the variable, it removes any other binding.
    # tensorrt_llm/executor/base_worker.py: right after set_device.
    Framework("TensorRT-LLM", "tensorrt_llm", off={"TLLM_NUMA_AWARE_WORKER_AFFINITY": "0"}, is_last=True),
    # nemo_rl/distributed/numa_utils.py; nemo_rl/models: some workers call it after set_device.
    Framework("NeMo RL", "nemo_rl", off={"NRL_DISABLE_NUMA_BINDING": "1"}, is_last=True),
    # torch/distributed/run.py, torch/numa/binding.py: the ranks inherit it.
    Framework("torchrun", "torch", on=("--numa-binding",)),
    # accelerate/commands/launch.py, accelerate/state.py: after set_device.
    Framework("Accelerate", "accelerate", on=("--enable-cpu-affinity", "ACCELERATE_CPU_AFFINITY"), is_last=True),
    # deepspeed/launcher/launch.py: the ranks start below numactl.
    Framework("DeepSpeed", "deepspeed", on=("--bind-cores-to-rank",)),
)


class Conflict(NamedTuple):
    """A framework that binds its processes, too, because the user says so.

    Attributes:
        problem: The framework and the settings.
        hint: The remedy.
        is_certain: Whether an option of the command says so. A variable may be set for other programs.
    """

    problem: str
    hint: str
    is_certain: bool


def variables() -> dict[str, str]:
    """Return the variables that switch off what frameworks bind by default. Other programs ignore them."""
    return {name: value for framework in FRAMEWORKS for name, value in framework.off.items()}


def both_bind(command: Sequence[str], environ: Mapping[str, str]) -> list[Conflict]:
    """Return the frameworks that options of the command, or variables, let bind their processes."""
    words = [part for word in command for part in _split(word)]  # also those of `bash -c "…"`
    given: dict[str, str] = {}  # as it is written, by its name with hyphens; of --x and --no-x, the last one holds
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        name = option.replace("_", "-")
        if name.startswith("--no-"):
            given.pop(f"--{name.removeprefix('--no-')}", None)
        else:
            given[name] = option
    found = []
    for framework in FRAMEWORKS:
        settings = _switched_on(framework, environ)
        is_started = any(framework.module in word for word in words)
        options = [option for name, option in given.items() if is_started and name in framework.on]
        if settings or options:
            hints = [f"leave out {', '.join(options)}"] if options else []
            hints += [f"unset {name}" for name in settings]
            problem = _problem(framework, [*settings.values(), *options])
            found.append(Conflict(problem, "; ".join(hints), is_certain=bool(options)))
    return found


def bind_themselves(modules: Container[str], environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each framework among a process's modules whose binding a variable has switched on."""
    found = [(framework, _switched_on(framework, environ)) for framework in FRAMEWORKS if framework.module in modules]
    return [_problem(framework, settings.values()) for framework, settings in found if settings]


def _switched_on(framework: Framework, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that switch on a framework's binding, as NAME=value, by their names."""
    default = {**dict.fromkeys(framework.on, "0"), **framework.off}
    return {
        name: f"{name}={environ[name]}"
        for name, value in default.items()
        if name in environ and _is_true(environ[name]) != _is_true(value)
    }


def _problem(framework: Framework, settings: Iterable[str]) -> str:
    which = "which replaces numapin's binding" if framework.is_last else "and numapin replaces that binding"
    return f"{framework.name} binds its processes itself ({', '.join(settings)}), {which}"


def _split(word: str) -> list[str]:
    import shlex  # not in each process that is bound

    try:
        return shlex.split(word)
    except ValueError:  # a quotation mark is missing
        return word.split()


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
