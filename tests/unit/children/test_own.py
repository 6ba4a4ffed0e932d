"""What a process below `numapin exec --children` does when it takes a GPU, in a real process."""

from __future__ import annotations

from pathlib import Path

import pytest

from numapin import Memory
from tests.needs import needs_two_cpus
from tests.unit.children.below import CPUS, run
from tests.unit.children.seam import is_chosen


@needs_two_cpus
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_helper_follows_a_process_whose_local_rank_was_wrong(rank: str, tmp_path: Path) -> None:
    """A helper inherits LOCAL_RANK; it follows the GPU that its parent took, and only another rank names one."""
    text = """
print(cpus())
torch.cuda.set_device(1)
print(cpus())
subprocess.run(HELPER)
subprocess.run(HELPER, env={**os.environ, "LOCAL_RANK": "2"})
"""
    ran = run(tmp_path, text, LOCAL_RANK=rank)
    assert ran.lines == [f"[{CPUS[number]}]" for number in (int(rank), 1, 1, 0)], ran.err


def test_a_plan_that_others_hold_stays_as_it_is(tmp_path: Path) -> None:
    """What children must know of a wrong rank is in a new plan, which this process and its forks use from then on.

    Records of the wrong rank, and of a device that does not exist, go.
    """
    text = """
from numapin.children import own
held = own.table()
saw = dict(held.saw)
torch.cuda.set_device(7)
torch.cuda.set_device(1)
print(held.saw == saw, saw["LOCAL_RANK"], own.table().saw["LOCAL_RANK"], own.table().render() in os.environ.values())
"""
    ran = run(tmp_path, text, LOCAL_RANK="0")
    assert ran.lines == ["True None 0 True"], ran.err
    assert [(each["local_rank"], "why" in each) for each in ran.records] == [(1, False)]


@pytest.mark.parametrize(
    ("memory", "strict", "status", "is_told"),
    [(Memory.BIND, False, 0, True), (Memory.BIND, True, 5, True), (Memory.PREFERRED, True, 0, False)],
)
def test_a_policy_that_only_another_thread_has(
    memory: Memory, tmp_path: Path, *, strict: bool, status: int, is_told: bool
) -> None:
    """The main thread's policy is reported if another thread took the GPU; `bind` is then not in force."""
    text = """
import threading
thread = threading.Thread(target=torch.cuda.set_device, args=(0,))
thread.start()
thread.join()
"""
    ran = run(tmp_path, text, memory=memory, strict=strict)
    assert ran.status == status, ran.err
    (record,) = ran.records
    assert (record["applied"]["memory"], record["applied"]["nodes"]) == ("none", "")
    assert ("memory policy 'bind' holds only for the thread" in ran.err) == bool(record["surprises"]) == is_told
    assert "memory none;" in ran.err


@pytest.mark.parametrize(("nodes", "strict", "num_said"), [((0, 1), False, 1), ((0, 1), True, 2), ((0, 0), True, 0)])
def test_a_second_gpu(nodes: tuple[int, int], num_said: int, tmp_path: Path, *, strict: bool) -> None:
    """The process stays at its first GPU; one warning names both if they are of two nodes, and --strict ends it."""
    text = "torch.cuda.set_device(0)\ntorch.cuda.set_device(1)\n" * 2
    ran = run(tmp_path, text, memory=Memory.BIND, nodes=nodes, strict=strict)
    (record,) = ran.records
    assert (record["applied"]["memory"], record["applied"]["nodes"]) == ("bind", "0"), ran.err
    assert record["gpus"] == ["GPU 0", "GPU 1"]
    assert ran.err.count("uses GPUs of several nodes (GPU 0, GPU 1): it stays on") == num_said
    assert ran.status == (5 if num_said == 2 else 0)


def test_the_policy_of_the_main_thread(tmp_path: Path) -> None:
    """A process that takes its GPU in the main thread has the policy, also if a fork of another thread does."""
    text = """
import threading
def fork():
    if os.fork() == 0:
        torch.cuda.set_device(0)
        os._exit(0)
    os.wait()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
torch.cuda.set_device(1)
"""
    ran = run(tmp_path, text, memory=Memory.BIND, strict=True)
    assert ran.status == 0, ran.err
    assert [(each["applied"]["memory"], each["applied"]["nodes"]) for each in ran.records] == [("bind", "0")] * 2


@needs_two_cpus
def test_numbers_of_devices_count_in_the_own_list(tmp_path: Path) -> None:
    """`bind_this_process` takes a number as CUDA counts in this process, also as text; others are errors.

    set_device("cuda") fails as in torch without numapin, and initializes nothing.
    """
    text = """
import numapin
try:
    torch.cuda.set_device("cuda")
except ValueError:
    print(torch.cuda.is_initialized(), len(cpus()))
for device in (0, "1", "0", "cuda:1", -1, "9" * 5000, "cuda:" + "9" * 5000):
    try:
        numapin.bind_this_process(device)
    except numapin.UsageError:
        print("error")
    else:
        print(cpus())
"""
    ran = run(tmp_path, text, CUDA_VISIBLE_DEVICES="1,0")
    own = [f"[{CPUS[number]}]" for number in (1, 0, 1, 0)]
    assert ran.lines == [f"False {len(CPUS)}", *own, *["error"] * 3], ran.err


@pytest.mark.parametrize(("former", "now", "of_user"), [(9, 4, ""), (3, 3, ""), (9, 9, "OMP"), (9, 9, "MKL")])
def test_threads_of_a_torch_that_was_imported_before(former: int, now: int, of_user: str, tmp_path: Path) -> None:
    """A late binding lowers torch's number of threads to the process's share, unless the user has set a variable."""
    text = f"torch.set_num_threads({former})\ntorch.cuda.set_device(0)\nprint(torch.get_num_threads())"
    omp, mkl = ("9" if of_user == name else "" for name in ("OMP", "MKL"))
    ran = run(tmp_path, text, OMP_NUM_THREADS=omp, MKL_NUM_THREADS=mkl)
    assert ran.lines == [str(now)], ran.err
    assert ("; torch uses 4 threads instead of 9" in ran.err) == (now < former), ran.err


@pytest.mark.parametrize(("num_threads", "chosen"), [(64, False), (32, False), (24, True), (16, True), (17, False)])
def test_a_number_of_threads_that_the_program_has_set(num_threads: int, *, chosen: bool) -> None:
    """Torch's number stays if it is neither that of the former CPUs or cores, nor more than the CPUs."""
    assert is_chosen(num_threads, before=[64], now=16 if num_threads == 17 else 32) == chosen


ON = "TensorRT-LLM binds its processes itself (TLLM_NUMA_AWARE_WORKER_AFFINITY=True), which replaces numapin's binding"
OFF = "SGLang's own binding is off (SGLANG_AUTO_NUMA_BIND=0)"


@pytest.mark.parametrize(
    ("module", "rank", "strict", "said"),
    [
        ("tensorrt_llm", "", False, "warning: " + ON),
        ("tensorrt_llm", "", True, ON),
        ("sglang", "", False, OFF),
        ("sglang", "0", False, OFF),  # imported after its GPU was known
    ],
)
def test_a_framework_that_binds_itself(module: str, rank: str, said: str, tmp_path: Path, *, strict: bool) -> None:
    """One line is about a framework that the process has imported, and whose own binding is off, or switched on.

    With --strict, a process ends that runs one whose binding a variable switches on; others do not.
    """
    (tmp_path / f"{module}.py").touch()
    text = f"sys.path.append({str(tmp_path)!r})\nimport {module}\n" + "torch.cuda.set_device(0)\n" * 2
    ran = run(
        tmp_path,
        text,
        strict=strict,
        LOCAL_RANK=rank,
        TLLM_NUMA_AWARE_WORKER_AFFINITY="True",
        NRL_DISABLE_NUMA_BINDING="0",
        SGLANG_AUTO_NUMA_BIND="0",
        SGLANG_SET_CPU_AFFINITY="no",
    )
    assert ran.status == 5 * strict, ran.err
    lines = [line for line in ran.err.splitlines() if "TensorRT-LLM" in line or "NeMo" in line or "SGLang" in line]
    assert len(lines) == 1, ran.err
    assert said in lines[0]
