"""Frameworks that bind their own processes: what is recognized on a command line and in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.children.seam import FRAMEWORKS, both_bind, variables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "frameworks.md"
REPLACED = "and numapin replaces that binding"
REPLACES = "which replaces numapin's binding"


@pytest.mark.parametrize(
    ("name", "line", "setting", "order"),
    [
        ("vLLM", "vllm serve MODEL --numa-bind", "--numa-bind", REPLACED),
        ("vLLM", "python -m vllm.entrypoints.cli --numa_bind_nodes=0 1", "--numa_bind_nodes", REPLACED),
        ("SGLang", "python -m sglang.launch_server --numa-node 0 1", "--numa-node", REPLACED),
        ("SGLang", "serve.py", "SGLANG_AUTO_NUMA_BIND=true", REPLACED),
        ("TensorRT-LLM", "serve.py", "TLLM_NUMA_AWARE_WORKER_AFFINITY=1", REPLACES),
        ("NeMo RL", "grpo.py", "NRL_DISABLE_NUMA_BINDING=0", REPLACES),
        ("torchrun", "torchrun --numa-binding=node train.py", "--numa-binding", REPLACED),
        ("Accelerate", "accelerate launch --enable_cpu_affinity train.py", "--enable_cpu_affinity", REPLACES),
        ("Accelerate", "accelerate launch train.py", "ACCELERATE_CPU_AFFINITY=1", REPLACES),
        ("DeepSpeed", "deepspeed --bind_cores_to_rank train.py", "--bind_cores_to_rank", REPLACED),
    ],
)
def test_both_bind(name: str, line: str, setting: str, order: str) -> None:
    """An option, or a variable that the user has set, is a problem, with the order in which the two bind."""
    environ = {} if setting.startswith("--") else dict([setting.split("=")])
    is_option = not environ
    hint = f"leave out {setting}" if is_option else f"unset {setting.partition('=')[0]}"
    quoted = line.replace(setting, f"'{setting}'")
    for command in (
        line.split(),
        ["bash", "-c", f"exec {line}"],
        ["bash", "-c", quoted],
        ["bash", "-c", f"{line} # it's"],
    ):
        expected = f"{name} binds its processes itself ({setting}), {order}", hint, is_option
        assert both_bind(command, environ) == [expected]


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("vllm serve MODEL --no-numa-bind --numa-node 1", {}),
        ("vllm serve MODEL --numa-bind --no-numa-bind", {}),
        ("python train.py --numa-node 0 --numa-bind", {}),
        ("vllm serve MODEL", {"SGLANG_SET_CPU_AFFINITY": "no", "NRL_DISABLE_NUMA_BINDING": "1"}),
        ("trtllm-serve MODEL", variables()),
    ],
)
def test_only_one_binds(line: str, environ: dict[str, str]) -> None:
    """What is off is no problem, nor is another program's option of the same name."""
    assert both_bind(line.split(), environ) == []


def test_each_framework_has_a_row_in_the_documentation() -> None:
    """The table has each framework's name, variables and options."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for framework in FRAMEWORKS:
        settings = [*(f"{name}={value}" for name, value in framework.off.items()), *framework.on]
        (row,) = [row for row in rows if row.startswith(f"| {framework.name} ")]
        assert [setting for setting in settings if setting not in row + row.replace("_", "-")] == [], framework.name
