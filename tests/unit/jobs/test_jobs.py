"""Job scripts: checks by shells, YAML readers and Kubernetes' own schemas, the examples, and what needs no script.

The scripts themselves and what is refused are recorded: tests/recorded/jobs.txt and jobs-refused.txt.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from numapin import Topology
from numapin.errors import UsageError
from tests.jobs import schemas
from tests.jobs.cases import CASES, ENGINES, HOSTILE, expanded, machine_files, write
from tests.machines.grids import grid
from tests.recorded.screens import compare, compare_answers
from tests.unit.jobs.seam import Form, GpuVendor, JobRequest, KubernetesKind, notation, sized

SHELL_CASES = [name for name in CASES if not name.startswith("kubernetes")]
POD_CASES = [name for name in CASES if name.startswith("kubernetes")]
FORMS = [kind.value for kind in KubernetesKind]


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return machine_files(tmp_path_factory.mktemp("machines"))


def _documents(arguments: list[str]) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(write(["kubernetes", *arguments])))


# --- shells ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "options"), [((), ()), (HOSTILE, ("--severity=warning",))], ids=["own", "hostile"])
def test_scripts_are_what_bash_takes(
    words: tuple[str, ...], options: tuple[str, ...], machines: dict[str, str], tmp_path: Path
) -> None:
    """Bash parses every script, and shellcheck finds nothing; style remarks on hostile words concern the user's own."""
    for name in SHELL_CASES:
        arguments = shlex.split(CASES[name].format(**machines))
        program = next(i for i, word in enumerate(arguments) if word.startswith(("train.", "./train.", "package.")))
        script = tmp_path / f"{name}.sh"
        script.write_text(write([*arguments[:program], *words] if words else arguments))
        subprocess.run(["bash", "-n", script], check=True)
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on PATH; type: apt-get install shellcheck")
    scripts = sorted(tmp_path.iterdir())
    done = subprocess.run(["shellcheck", *options, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "mpi"])
def test_directives_come_first_and_hold_no_shell(engine: str) -> None:
    """Directives come before the first command, one per line, and contain nothing that a shell expands."""
    given = "--nodes 2 --gpus-per-node 2 --cpus-per-task 4 --time 4h --signal 60 --requeue --queue q --account a"
    lines = write([engine, *given.split(), *HOSTILE]).splitlines()
    mark = lines[1].partition(" ")[0]
    directives = [line for line in lines if line.startswith(f"{mark} ")]
    assert lines[1 : len(directives) + 1] == directives
    assert not [line for line in directives if set(line.removeprefix(mark)) & set("$`'\\;&|")]


def _directives(line: str) -> str:
    engine, *given = shlex.split(line.replace(r"\n", "\n"))
    try:
        text = write([engine, "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4", *given, "train.py"])
    except UsageError as error:
        return f"error: {error.message}"
    lines = text.partition("# Written by")[0].splitlines()[1:]
    (mark,) = {line.partition(" ")[0] for line in lines}
    return "\n".join(line.removeprefix(f"{mark} ") for line in lines)


def test_directives_are_added_or_refused() -> None:
    """A line of one's own comes last; it may replace a default of ours, and may not contradict what was asked for."""
    compare_answers(Path(__file__).with_name("directives.txt"), _directives)


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("schemas")  # reading them takes seconds
@pytest.mark.parametrize("name", POD_CASES)
def test_manifests_are_what_the_api_takes(name: str, machines: dict[str, str]) -> None:
    """Each document and the pods inside it fit the schemas of their APIs; unknown fields are errors."""
    for document in yaml.safe_load_all(write(shlex.split(CASES[name].format(**machines)))):
        schemas.require_valid(document)


@pytest.mark.parametrize("form", FORMS)
def test_pods_are_guaranteed_and_get_the_words_that_were_typed(form: str) -> None:
    """Limits equal requests in whole CPUs, and Kubernetes expands nothing in the command: `$(x)` arrives unchanged."""
    given = f"--form {form} --nodes 2 --gpus-per-node 2 --cpus-per-task 16 --mem-per-node 64G --container a/b:c"
    documents = _documents([*given.split(), *HOSTILE, "$$(A)", "$(A)", "$$", "$", "$$$(A)"])
    template = next(pod for document in documents for pod in schemas.pods(document))
    (container,) = template["spec"]["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"] == {"cpu": 16, "memory": "65536Mi", "nvidia.com/gpu": 2}
    words = [expanded(word) for word in container["command"] + container["args"]]
    assert words == ["numapin", "run", *HOSTILE, "$$(A)", "$(A)", "$$", "$", "$$$(A)"]


_POD = ["--gpus-per-node", "4", "--cpus-per-task", "8", "--mem-per-node", "8G", "--container", "a"]


@pytest.mark.parametrize("value", ["", "$(PATH)", "$$", "a\nb", "ünï 🜁", "no", "1e3", '"', "-"])
def test_the_value_of_a_variable_arrives_as_it_was_typed(value: str) -> None:
    """Kubernetes expands nothing in it, and YAML does not take it for another type."""
    (document,) = _documents([*_POD, "--env", f"A={value}", "train.py"])
    (container,) = document["spec"]["template"]["spec"]["containers"]
    (written,) = [entry["value"] for entry in container["env"] if entry["name"] == "A"]
    assert expanded(written) == value


@pytest.mark.xdist_group("schemas")
def test_the_schemas_find_wrong_fields() -> None:
    """A misspelled field and a wrong type are found, whoever wrote the schema: in each kind, its pods, and claims."""
    claims = ["--device-class", "gpu.nvidia.com", "--match-attribute", "a.b/c"]
    for form in FORMS:
        for document in _documents(["--form", form, "--nodes", "2", *_POD, *claims, "train.py"]):
            name, value = next(iter(document["spec"].items()))
            wrongs: list[dict[str, Any]] = [{"numNode": 2}, {name: [value]}]
            if isinstance(value, dict):
                wrongs.append({name: {**value, "numNode": 2}})
            for wrong in wrongs:
                with pytest.raises(jsonschema.ValidationError):
                    schemas.require_valid({**document, "spec": {**document["spec"], **wrong}})
            for pod in schemas.pods(document):
                pod["spec"]["containers"][0]["commands"] = ["true"]
                with pytest.raises(jsonschema.ValidationError):
                    schemas.require_valid(document)


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["slurm", "--gpus-per-node", "4"], "no script", "numapin job slurm "),
        (["kubernetes", "--gpus-per-node", "4", ""], "no script", "numapin job kubernetes "),
        (["slurm", "--gpus-per-node", "4", "--", "-x.py"], "begins with a dash", "write ./-x.py"),
        (["slurm", "--gpus-per-node", "4", "bad\udcff.py"], "is not text", "UTF-8"),
        (["kubernetes", *_POD, "--env", "A=\udcff", "train.py"], "is not text", "UTF-8"),
    ],
)
def test_what_no_script_can_hold_is_refused(arguments: list[str], message: str, hint: str) -> None:
    """The error names the word, and the hint the engine that was typed."""
    with pytest.raises(UsageError, match=message) as refused:
        write(arguments)
    assert hint in (refused.value.hint or "")


def test_output_is_the_script(tmp_path: Path) -> None:
    """--output writes the same text as stdout would get, and prints nothing."""
    assert write(["slurm", "--gpus-per-node", "4", "--output", str(tmp_path / "job.sh"), "train.py"]) == ""
    written, shown = (tmp_path / "job.sh").read_text(), write(["slurm", "--gpus-per-node", "4", "train.py"])
    assert written.replace(f"--output {tmp_path}/job.sh ", "") == shown


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


@pytest.mark.parametrize(
    ("asked", "spare_cores", "cpus", "is_whole"),
    [
        ({"gpus_per_node": 8}, 0, 256, True),
        ({"gpus_per_node": 4}, 0, 128, False),
        ({"gpus_per_node": 1, "smt": False}, 0, 16, False),
        ({"gpus_per_node": 8}, 1, 240, True),
        ({"gpus_per_node": 3, "form": Form.TASK}, 0, 32, False),
    ],
)
def test_a_job_gets_the_part_of_a_machine_that_goes_with_its_gpus(
    asked: dict[str, Any], spare_cores: int, cpus: int, is_whole: object, machines: dict[str, str]
) -> None:
    """Half of the GPUs get half of the cores and of the memory; hardware threads count if they are used."""
    request, topology = JobRequest(command=("a",), **asked), Topology.from_json(Path(machines["dgx"]).read_text())
    share = sized(request, topology, spare_cores=spare_cores, memory_by_number=True)
    assert (share.cpus_per_task, share.whole_nodes) == (cpus, is_whole)
    assert share.memory_bytes == int((1 << 40) * (request.gpus_per_node or 8) // 8 * 0.9)


def _image(typed: str) -> str:
    try:
        apptainer = notation.for_apptainer(typed)
    except UsageError as error:
        apptainer = error.message
    return f"{notation.for_pyxis(typed)} | {notation.in_registry(typed)} | {apptainer}"


def test_images_are_named_as_each_program_takes_them() -> None:
    """Enroot needs a # after the registry, Apptainer a scheme; files and other schemes stay as they are."""
    compare_answers(Path(__file__).with_name("images.txt"), _image)


# --- the job scripts in examples/ are the output of the commands in their READMEs ------------------------------------


@pytest.mark.parametrize("folder", ["slurm", "mpi", "kubernetes"])
def test_examples_are_what_their_readme_writes(folder: str) -> None:
    """Each file is the output of its command, and there are no others; its program is in this repository.

    That of a manifest is in its image.
    """
    place = Path(__file__).resolve().parents[3] / "examples" / folder
    lines = (place / "README.md").read_text().splitlines()
    shown = [shlex.split(line)[3:] for line in lines if line.startswith("$ numapin job ")]
    commands = {words[-1]: words[:-2] for words in shown}
    assert {path.name for path in place.iterdir()} == {*commands, "README.md"}
    for name, arguments in commands.items():
        compare(write(arguments), str(place / name))
        assert folder == "kubernetes" or (place.parents[1] / arguments[-1]).is_file()
