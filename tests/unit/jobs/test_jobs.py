"""Job scripts: refused input, and checks by shells, YAML readers and Kubernetes' own schemas.

The scripts themselves are recorded: tests/recorded/jobs.txt.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from numapin import Topology
from numapin.errors import BindingRefused, UsageError
from tests.jobs import schemas
from tests.jobs.cases import CASES, HOSTILE, dgx, expanded, refusal, write
from tests.machines.grids import grid
from tests.machines.roots import HERE as MACHINES
from tests.unit.jobs.seam import (
    Form,
    GpuVendor,
    JobRequest,
    KubernetesKind,
    Launch,
    image,
    job,
    kubernetes,
    scripts,
    sized,
)

if TYPE_CHECKING:
    from pathlib import Path

SHELL_CASES = [name for name in CASES if not name.startswith("kubernetes")]
POD_CASES = [name for name in CASES if name.startswith("kubernetes")]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the machine file of a DGX A100."""
    return dgx(tmp_path_factory.mktemp("machine"))


def _text(name: str, machine: Path) -> str:
    return write(shlex.split(CASES[name].format(dgx=machine)))


# --- shells ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHELL_CASES)
def test_scripts_are_what_bash_takes(name: str, machine: Path) -> None:
    """Bash parses every script, and shellcheck finds nothing."""
    text = _text(name, machine)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    _check(text)


@pytest.mark.parametrize("name", SHELL_CASES)
def test_scripts_with_hostile_words_are_what_bash_takes(name: str, machine: Path) -> None:
    """The same holds for any program name; shellcheck's style remarks then concern the user's own words."""
    arguments = shlex.split(CASES[name].format(dgx=machine))
    program = next(i for i, word in enumerate(arguments) if word.startswith(("train.", "./train.", "package.")))
    text = write([*arguments[:program], *HOSTILE])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    _check(text, "--severity=warning")


def _check(text: str, *options: str) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on PATH; type: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", *options, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("engine", ["slurm", "pbs", "lsf"])
def test_directives_come_first_and_hold_no_shell(engine: str) -> None:
    """Directives come before the first command, one per line, and contain nothing that a shell expands."""
    given = "--nodes 2 --gpus-per-node 2 --cpus-per-task 4 --time 4h --signal 60 --requeue --queue q --account a"
    lines = write([engine, *given.split(), *HOSTILE]).splitlines()
    marks = {"slurm": "#SBATCH ", "pbs": "#PBS ", "lsf": "#BSUB "}
    directives = [line for line in lines if line.startswith(marks[engine])]
    assert lines[1 : len(directives) + 1] == directives
    assert not [line for line in directives if set(line) & set("$`'\\;&|")]


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def _documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("name", POD_CASES)
def test_manifests_are_what_the_api_takes(name: str, machine: Path) -> None:
    """Each document and the pods inside it fit the schemas of their APIs; unknown fields are errors."""
    for document in _documents(_text(name, machine)):
        schemas.require_valid(document)


@pytest.mark.parametrize(
    ("vendor", "resource"), [("nvidia", "nvidia.com/gpu"), ("amd", "amd.com/gpu"), ("intel", "gpu.intel.com/i915")]
)
def test_a_pod_asks_for_the_gpus_of_its_vendor(vendor: str, resource: str, tmp_path: Path) -> None:
    """The machine file says whose GPUs the hosts have; the pod asks for the resource of that vendor's plugin."""
    machine = json.loads((MACHINES / "golden" / "1pkg-4node-smt2-8amd.json").read_text())["topology"]
    machine["gpus"] = [gpu | {"vendor": vendor} for gpu in machine["gpus"]]
    (tmp_path / "m.json").write_text(json.dumps(machine))
    text = write(["kubernetes", "--machine", str(tmp_path / "m.json"), "--container", "a", "train.py"])
    assert f"{resource}: 8" in text
    assert text.count("gpu: 8") + text.count("i915: 8") == 2  # requests and limits


def test_only_gpus_of_the_ranks_vendor_count(tmp_path: Path) -> None:
    """Beside one NVIDIA GPU, an AMD GPU is listed and hidden: a job takes one GPU, and all of the host with it."""
    topology = replace(grid(gpus=(0, 1)), source="m.json")
    nvidia, amd = topology.gpus
    mixed = (
        replace(nvidia, vendor=GpuVendor.NVIDIA),
        replace(amd, vendor=GpuVendor.AMD, visible=False, cuda_index=None),
    )
    machine = replace(topology, gpus=mixed)
    (tmp_path / "m.json").write_text(json.dumps(machine.to_json()))
    text = write(["slurm", "--machine", str(tmp_path / "m.json"), "train.py"])
    assert "--gpus-per-node=1\n" in text
    assert "--exclusive" in text
    request = JobRequest(command=("a",), gpus_per_node=2)
    with pytest.raises(UsageError, match=r"--gpus-per-node 2: m\.json has 1 GPU\n"):
        sized(request, machine, spare_cores=0, memory_by_number=True)


@pytest.mark.parametrize("engine", ["slurm", "lsf"])
def test_whole_hosts_are_said(engine: str, machine: Path) -> None:
    """Without CPUs or a machine file a job takes whole hosts, and a warning says how to share them."""

    def warned(*options: str) -> str:
        done = CliRunner().invoke(job, [engine, *options, "train.py"], standalone_mode=False)
        assert done.exception is None
        return done.stderr

    assert "warning: the job takes whole hosts: the CPUs and memory that belong to 2 GPUs are unknown" in warned(
        "--gpus-per-node", "2"
    )
    assert warned("--gpus-per-node", "2", "--cpus-per-task", "16") == ""
    assert warned("--gpus-per-node", "0") == ""
    assert "whole hosts" not in warned("--gpus-per-node", "2", "--machine", str(machine))


def test_a_pod_asks_for_whole_intel_gpus(tmp_path: Path) -> None:
    """Four ranks on four tiles need two GPUs of Intel's plugin, which does not count tiles; three tiles need two."""
    machine = json.loads((MACHINES / "golden" / "2pkg-2node-2intel-2tile.json").read_text())["topology"]
    (tmp_path / "m.json").write_text(json.dumps(machine))
    for number in ("4", "3"):
        arguments = ["--gpus-per-node", number, "--machine", str(tmp_path / "m.json"), "--container", "a", "train.py"]
        text = write(["kubernetes", *arguments])
        assert text.count("gpu.intel.com/i915: 2") == 2
        (document,) = _documents(text)
        (container,) = document["spec"]["template"]["spec"]["containers"]
        assert {"name": "PET_NPROC_PER_NODE", "value": number} in container["env"]


def test_intel_in_kubernetes_names_the_resource_of_the_other_driver() -> None:
    """The machine file does not say which driver serves Intel's GPUs, so the other resource is named."""
    request = JobRequest(command=("train.py",), gpus_per_node=1, vendor=GpuVendor.INTEL)
    assert "gpu.intel.com/xe" in kubernetes.warnings(request)[0]
    assert kubernetes.warnings(replace(request, vendor=GpuVendor.AMD)) == ()


def test_the_schemas_find_what_is_wrong() -> None:
    """The validation does find errors."""
    text = write(
        [
            "kubernetes",
            *["--gpus-per-node", "2", "--cpus-per-task", "4", "--mem-per-node", "64G", "--container", "a", "train.py"],
        ]
    )
    (document,) = _documents(text)
    document["spec"]["completion"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, schemas.versions()[1], strict=True)


@pytest.mark.parametrize("form", list(KubernetesKind))
def test_pods_are_guaranteed_and_get_the_words_that_were_typed(form: str) -> None:
    """Limits equal requests in whole CPUs, and Kubernetes expands nothing in the command: `$(x)` arrives unchanged."""
    given = f"--form {form} --nodes 2 --gpus-per-node 2 --cpus-per-task 16 --mem-per-node 64G --container a/b:c"
    documents = _documents(write(["kubernetes", *given.split(), *HOSTILE, "$$(A)", "$(A)", "$$", "$", "$$$(A)"]))
    template = next(pod for document in documents for pod in schemas.pods(document))
    (container,) = template["spec"]["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"] == {"cpu": 16, "memory": "65536Mi", "nvidia.com/gpu": 2}
    words = [expanded(word) for word in container["args"]]
    assert words == ["numapin", "run", *HOSTILE, "$$(A)", "$(A)", "$$", "$", "$$$(A)"]
    assert expanded(container["command"][2]).startswith('ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit')


def test_shared_memory_is_asked_for_torchs_dataloader_only() -> None:
    """With numapin's DataLoader a pod has no volume at /dev/shm; torch's own DataLoader needs more than 64 MiB."""
    given = ["--gpus-per-node", "1", "--cpus-per-task", "4", "--mem-per-node", "8G", "--container", "a/b:c"]
    assert "/dev/shm" in write(["kubernetes", *given, "train.py"])  # noqa: S108
    for ours in ("numapin", "numapin-balanced"):
        manifest = write(["kubernetes", *given, "--dataloader", ours, "train.py"])
        assert "/dev/shm" not in manifest  # noqa: S108
        assert f'"--dataloader={ours}"' in manifest


# --- refused input ---------------------------------------------------------------------------------------------------

_GOOD = ("--gpus-per-node", "4")
_POD = ("--cpus-per-task", "4", "--mem-per-node", "8G")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sge", "train.py"], "unknown engine 'sge'"),
        (["slurm", *_GOOD], "no script"),
        (["slurm", "train.py"], "--gpus-per-node N"),
        (["slurm", *_GOOD, "--nodes", "0", "train.py"], "--nodes is 0"),
        (["slurm", *_GOOD, "--nodes", "-1", "train.py"], "--nodes is -1"),
        (["slurm", *_GOOD, "--nodes", "many", "train.py"], "'many'"),
        (["slurm", *_GOOD, "--nodes", "9999999", "train.py"], "must be at most 100000"),
        (["slurm", "--gpus-per-node", "-2", "train.py"], "--gpus-per-node is -2"),
        (["slurm", *_GOOD, "--ranks-per-node", "5", "train.py"], "more than the 4 GPUs"),
        (["slurm", *_GOOD, "--cpus-per-task", "0", "train.py"], "--cpus-per-task is 0"),
        (["slurm", *_GOOD, "--time", "soon", "train.py"], "'soon' is not a time"),
        (["slurm", *_GOOD, "--time", "4:00", "train.py"], "'4:00' is not a time; write 4:00:00"),
        (["slurm", *_GOOD, "--time", "60", "train.py"], "'60' is not a time"),
        (["slurm", *_GOOD, "--time", "0:00:00", "train.py"], "'0:00:00' is zero"),
        (["slurm", *_GOOD, "--time", "1-30:00:00", "train.py"], "30 hours after its days"),
        (["slurm", *_GOOD, "--time", "4:00:00\n#SBATCH --uid=0", "train.py"], "is not a time"),
        (["slurm", *_GOOD, "--signal", "60", "train.py"], "--signal requires --time"),
        (["slurm", *_GOOD, "--signal", "60", "--time", "1m", "train.py"], "not less than --time"),
        (["slurm", *_GOOD, "--signal", "0", "--time", "1h", "train.py"], "1 to 65535"),
        (["slurm", *_GOOD, "--job-name", 'a "b"\n#SBATCH', "train.py"], "--job-name 'a \"b\"\\n#SBATCH'"),
        (["slurm", *_GOOD, "--job-name", "x" * 64, "train.py"], "at most 63"),
        (["slurm", *_GOOD, "--job-name", "\u0661", "train.py"], "--job-name"),
        (["slurm", *_GOOD, "--partition", "gpu; rm", "train.py"], "--partition/--queue 'gpu; rm'"),
        (["slurm", *_GOOD, "--account", "a b", "train.py"], "--account 'a b'"),
        (["slurm", *_GOOD, "--container", "a b:c", "train.py"], "--container 'a b:c'"),
        (["slurm", *_GOOD, "--container", "--privileged", "train.py"], "--container '--privileged'"),
        (["slurm", *_GOOD, "--container", "dockerd://a", "train.py"], "no engine runs such a URI"),
        *(
            (["slurm", *_GOOD, "--container", typed, "train.py"], f"--container {typed!r} names no image")
            for typed in (
                *("docker://", "docker:///a", "docker://#a", "a#", "nvcr.io#", "nvcr.io/", "nvcr.io##a", "me@nvcr.io#"),
                *("a//b", "a:", "a@", "nvcr.io#nvidia/a:", "oras://", "library://", "https://"),
            )
        ),
        (["mpi", *_GOOD, "--container", "/images/a.sqsh", "train.py"], "which only Slurm with pyxis runs"),
        (["slurm", *_GOOD, "--mem-per-node", "lots", "train.py"], "'lots' is not a size"),
        (["slurm", *_GOOD, "--mem-per-node", "1K", "train.py"], "--mem-per-node is 1024"),
        (["slurm", *_GOOD, "--bind", "none", "--cpus-per-rank", "2", "train.py"], "binds nothing"),
        (["slurm", *_GOOD, "--gpus", "0,,1", "train.py"], "empty entry"),
        (["slurm", *_GOOD, "--plan", "p.json", "train.py"], "use --form task"),
        (["slurm", *_GOOD, "--form", "task", "--plan", "p.json", "--no-smt", "train.py"], "already decides --no-smt"),
        (["slurm", *_GOOD, "--gpus", "0,1", "train.py"], "names 2 GPUs for the 4 ranks"),
        (["slurm", *_GOOD, "--gpus", "4", "train.py"], "for 4 GPUs per host, give --gpus-per-node 4;"),
        (["slurm", "--gpus", "8", "train.py"], "for 8 GPUs per host, give --gpus-per-node 8"),
        (["slurm", *_GOOD, "--form", "task", "--gpus", "0,1", "train.py"], "--ranks-per-node 2, or name more GPUs"),
        (["slurm", *_GOOD, "--form", "task", "--dataloader", "numapin", "train.py"], "use --form node"),
        (["slurm", *_GOOD, "-m", "--no-python", "train.py"], "exclude each other"),
        *(
            (["slurm", *_GOOD, "--array", typed, "train.py"], f"{typed!r} is not a list of indices, such as 0-9")
            for typed in ("", "a", "1-", "1,", "0-9%", "0-9%0", "0-9:0", "1 2", "-1", "1\n#SBATCH")
        ),
        (["slurm", *_GOOD, "--array", "9-1", "train.py"], "has the range 9-1, which is empty"),
        (["pbs", *_GOOD, "--array", "1", "train.py"], "--array"),
        (["slurm", *_GOOD, "--env", "A=1", "train.py"], "--env"),
        (["slurm", *_GOOD, "--", "-x.py"], "begins with a dash"),
        (["slurm", *_GOOD, ""], "no script"),
        (["slurm", *_GOOD, "bad\udcff.py"], "is not text"),
        (["slurm", *_GOOD, "--hostfile", "h", "train.py"], "--hostfile"),
        (["mpi", *_GOOD, "--time", "1h", "train.py"], "--time"),
        (["mpi", *_GOOD, "--requeue", "train.py"], "--requeue"),
        (["pbs", *_GOOD, "train.py"], "CPUs of each host as a number"),
        (["kubernetes", *_GOOD, *_POD, "train.py"], "needs an image"),
        (["kubernetes", *_GOOD, *_POD, "--container", "/a.sif", "train.py"], "not an image in a registry"),
        (["kubernetes", *_GOOD, *_POD, "--container", "a", "--job-name", "a\nb: c", "train.py"], "--job-name"),
        (["kubernetes", *_GOOD, "--mem-per-node", "8G", "--container", "a", "train.py"], "needs its CPUs as a number"),
        (
            ["kubernetes", *_GOOD, "--cpus-per-task", "8", "--container", "a", "train.py"],
            "needs its memory as a number",
        ),
        (["kubernetes", *_GOOD, *_POD, "--container", "a", "--account", "b", "train.py"], "--account"),
        (["kubernetes", "--gpus", "8", "--container", "a", "train.py"], "for 8 GPUs per host, give --gpus-per-node 8"),
    ],
)
def test_wrong_input_is_refused_and_writes_no_file(arguments: list[str], message: str, tmp_path: Path) -> None:
    """The error names the option and the value, the status is 2, and no file is written."""
    options, rest = arguments[:1], arguments[1:]
    assert message in refusal([*options, "--output", str(tmp_path / "job"), *rest])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("--gpus-per-node 9", UsageError, "has 8 GPUs"),
        ("--gpus 0,8", UsageError, "--gpus"),
        ("--bind exclusive --cpus-per-rank 64 --strict", BindingRefused, "cannot be bound exactly"),
        ("--form task --gpus-per-node 0 --ranks-per-node 200", UsageError, "more than the 128 cores"),
        ("--cpus-per-task 257", UsageError, "257 CPUs per host are more than the 256 of"),
        ("--form task --cpus-per-task 33", UsageError, "264 CPUs per host are more than the 256 of"),
        ("--mem-per-node 90T", UsageError, "--mem-per-node 92160.0 GiB is more than"),
    ],
)
def test_what_the_machine_cannot_hold_is_refused_before_the_queue(
    options: str, error: type[Exception], message: str, machine: Path
) -> None:
    """With a machine file the plan is checked, so that an error does not come after hours in the queue."""
    with pytest.raises(error, match=message):
        write(["slurm", "--machine", str(machine), *options.split(), "train.py"])


def test_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """The error names the option of a file in a missing folder."""
    assert "choose another file for --output" in refusal(
        ["slurm", *_GOOD, "--output", f"{tmp_path}/no/job", "train.py"]
    )


def test_output_is_the_script(tmp_path: Path) -> None:
    """--output writes the same text as stdout would get, and prints nothing."""
    assert write(["slurm", *_GOOD, "--output", str(tmp_path / "job.sh"), "train.py"]) == ""
    assert (tmp_path / "job.sh").read_text() == write(["slurm", *_GOOD, "train.py"])


# --- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "pyxis", "apptainer", "registry"),
    [
        ("ubuntu:22.04", "ubuntu:22.04", "docker://ubuntu:22.04", "ubuntu:22.04"),
        ("nvidia/cuda:12", "nvidia/cuda:12", "docker://nvidia/cuda:12", "nvidia/cuda:12"),
        (
            "nvcr.io/nvidia/a:1-py3",
            "nvcr.io#nvidia/a:1-py3",
            "docker://nvcr.io/nvidia/a:1-py3",
            "nvcr.io/nvidia/a:1-py3",
        ),
        ("nvcr.io#nvidia/a:1", "nvcr.io#nvidia/a:1", "docker://nvcr.io/nvidia/a:1", "nvcr.io/nvidia/a:1"),
        ("me@nvcr.io#nvidia/a", "me@nvcr.io#nvidia/a", "docker://nvcr.io/nvidia/a", "nvcr.io/nvidia/a"),
        ("registry:5000/a/b", "registry:5000#a/b", "docker://registry:5000/a/b", "registry:5000/a/b"),
        ("localhost/a", "localhost#a", "docker://localhost/a", "localhost/a"),
        ("docker://nvcr.io/a:1", "nvcr.io#a:1", "docker://nvcr.io/a:1", "nvcr.io/a:1"),
        ("oras://ghcr.io/a/b:1", None, "oras://ghcr.io/a/b:1", None),
        ("library://a/b:1", None, "library://a/b:1", None),
        ("images/a.sif", None, "images/a.sif", None),
        ("./sandbox", None, "./sandbox", None),
        ("./sandboxes//a:/", None, "./sandboxes//a:/", None),
        ("/sandbox:", None, "/sandbox:", None),
        ("https://host//a.sif", None, "https://host//a.sif", None),
        ("/images/sandbox", None, "/images/sandbox", None),
        ("/images/a.sqsh", "/images/a.sqsh", "", None),
        ("images/a.sqsh", "./images/a.sqsh", "", None),
    ],
)
def test_images_are_named_as_each_program_takes_them(
    typed: str, pyxis: str | None, apptainer: str, registry: str | None
) -> None:
    """Enroot needs a # after the registry, Apptainer a scheme; files and other schemes stay as they are."""
    assert (image.for_pyxis(typed), image.in_registry(typed)) == (pyxis, registry)
    if apptainer:
        assert image.for_apptainer(typed) == apptainer
    words = [*_GOOD, *_POD, "--container", typed, "train.py"]
    started = f"--container-image={pyxis} " if pyxis else f"apptainer exec --nv {apptainer} "
    assert started in write(["slurm", *words])
    if registry:
        assert f"image: {registry}\n" in write(["kubernetes", *words]).replace('"', "")


@pytest.mark.parametrize(
    ("vendor", "start"),
    [
        (GpuVendor.NVIDIA, ["apptainer", "exec", "--nv", "a.sif"]),
        (GpuVendor.AMD, ["apptainer", "exec", "--rocm", "a.sif"]),
        (GpuVendor.INTEL, ["apptainer", "exec", "a.sif"]),
    ],
)
def test_apptainer_gets_the_option_of_the_vendor(vendor: GpuVendor, start: list[str]) -> None:
    """--nv brings NVIDIA's driver into the container, --rocm AMD's; Intel's GPUs need only /dev."""
    request = JobRequest(command=("train.py",), gpus_per_node=1, container="a.sif", vendor=vendor)
    (line,) = [line for line in scripts.mpi(request).splitlines() if "apptainer" in line]
    assert line.removesuffix("\\").split() == start


# --- derived values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "spare_cores", "cpus", "is_whole"),
    [
        ({"gpus_per_node": 8}, 0, 256, True),
        ({"gpus_per_node": 4}, 0, 128, False),
        ({"gpus_per_node": 1, "smt": False}, 0, 16, False),
        ({"gpus_per_node": 8}, 1, 240, True),
        ({"gpus_per_node": 0}, 0, 256, True),
        ({"gpus_per_node": 3, "form": Form.TASK}, 0, 32, False),
    ],
)
def test_a_job_gets_the_part_of_a_machine_that_goes_with_its_gpus(
    asked: dict[str, Any], spare_cores: int, cpus: int, is_whole: object, machine: Path
) -> None:
    """Half of the GPUs get half of the cores and of the memory; hardware threads count if they are used."""
    request, topology = JobRequest(command=("a",), **asked), Topology.from_json(machine.read_text())
    share = sized(request, topology, spare_cores=spare_cores, memory_by_number=True)
    assert (share.cpus_per_task, share.whole_nodes) == (cpus, is_whole)
    assert share.memory_bytes == int((1 << 40) * (request.gpus_per_node or 8) // 8 * 0.9)


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize(
    ("engine", "memory"), [("pbs", "mem={}mb"), ("lsf", "rusage[mem={}MB/host]"), ("slurm", "{}M")]
)
def test_memory_comes_from_the_machine(engine: str, memory: str, gpus: int, machine: Path) -> None:
    """A job gets its GPUs' share of the host's memory; only Slurm can request all of it without a number."""
    text = write([engine, "--form", "task", "--machine", str(machine), "--gpus-per-node", str(gpus), "train.py"])
    number = int((1 << 40) * gpus // 8 * 0.9) >> 20
    assert ("--mem=0" if engine == "slurm" and gpus == 8 else memory.format(number)) in text


@pytest.mark.parametrize(
    ("launch", "below_run", "below_exec"),
    [
        (Launch.SCRIPT, ("a.py", "-x"), ("python", "-u", "a.py", "-x")),
        (Launch.MODULE, ("--module", "a.py", "-x"), ("python", "-u", "-m", "a.py", "-x")),
        (Launch.PROGRAM, ("--no-python", "a.py", "-x"), ("a.py", "-x")),
    ],
)
def test_scripts_modules_and_programs(launch: Launch, below_run: tuple[str, ...], below_exec: tuple[str, ...]) -> None:
    """`numapin run` gets an option for the kind of program; `numapin exec` gets the command that run would start."""
    request = JobRequest(command=("a.py", "-x"), gpus_per_node=1, launch=launch)
    assert (scripts.run_command(request), scripts.rank_command(request)) == (below_run, below_exec)


def test_ranks_and_tasks_follow_the_gpus() -> None:
    """One rank per GPU, one without GPUs, or as many as requested; one task per host or per rank."""
    assert JobRequest(command=("a",), gpus_per_node=8).num_ranks == 8
    assert JobRequest(command=("a",), gpus_per_node=0).num_ranks == 1
    few = JobRequest(command=("a",), gpus_per_node=8, ranks_per_node=2, form=Form.TASK, cpus_per_task=3)
    assert (few.num_ranks, few.tasks_per_node, few.cpus_per_node) == (2, 2, 6)


def test_the_number_of_ranks_has_the_name_of_run() -> None:
    """`numapin job --nproc-per-node` is `--ranks-per-node`, as `numapin run` and `numapin plan` name it."""
    line = ["slurm", "--gpus-per-node", "8", "--time", "1h", "train.py"]
    assert write([*line[:-1], "--nproc-per-node", "4", line[-1]]) == write(
        [*line[:-1], "--ranks-per-node", "4", line[-1]]
    )


def test_golden_machine_has_what_the_figures_say(machine: Path) -> None:
    """The machine of these tests is a DGX A100 with 128 cores in 8 nodes and 1 TiB."""
    topology = json.loads(machine.read_text())
    assert (len(topology["cores"]), len(topology["nodes"]), len(topology["gpus"])) == (128, 8, 8)
    assert sum(node["memory_bytes"] for node in topology["nodes"]) == 1 << 40


def test_hints_name_the_engine_that_was_typed() -> None:
    """A number out of range and a missing script refer to the help of that engine, not to Slurm's."""
    for engine in ("slurm", "kubernetes", "mpi"):
        with pytest.raises(UsageError, match="--nodes is 0") as wrong:
            write([engine, *_GOOD, "--nodes", "0", "train.py"])
        assert wrong.value.hint == f"numapin job {engine} --help"
        with pytest.raises(UsageError, match="no script") as missing:
            write([engine, *_GOOD])
        assert f"numapin job {engine} " in missing.value.hint


def test_all_that_a_pod_lacks_is_named_at_once() -> None:
    """The image, the CPUs and the memory are one error, whose hint has all three options."""
    with pytest.raises(UsageError, match=r"an image, its CPUs as a number and its memory as a number") as caught:
        write(["kubernetes", *_GOOD, "train.py"])
    for option in ("--container", "--cpus-per-task N", "--mem-per-node SIZE", "--machine FILE"):
        assert option in caught.value.hint
    with pytest.raises(UsageError, match=r"^a pod needs an image\n") as lacking:
        write(["kubernetes", *_GOOD, *_POD, "train.py"])
    assert "--machine" not in lacking.value.hint
