"""Frameworks that copy or re-create loaders: the real packages, with numapin's data path.

Accelerate 1.15 copies fifteen attributes of a loader into a plain torch DataLoader and keeps the original as
`base_dataloader`; Lightning 2.6 calls `type(loader)(...)` again with its own sampler. Each test is a script in its own
process, because both change classes of torch for good: a fork of one that has imported the frameworks. Below `numapin
run`, it calls the hook of --dataloader with torch's module, as the hook does when a rank imports that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.forking import CommandLine, Forker
from tests.integration.launching import Done, environment, numapin, script
from tests.needs import needs_accelerate

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("frameworks")]  # so that they are imported once
needs_lightning = pytest.mark.skipif(
    find_spec("pytorch_lightning") is None, reason="no pytorch_lightning; type: pip install .[dev]"
)
needs_torchdata = pytest.mark.skipif(find_spec("torchdata") is None, reason="no torchdata; type: pip install .[dev]")

RUN = ("run", "--quiet", "--dataloader=numapin", "--nproc-per-node", "2")

DATA = """
import json, os, sys, warnings
warnings.simplefilter("ignore")  # of the frameworks
import torch
import torch.utils.data

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.full((2048,), float(i))

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (torch.full((2048,), float(i)) for i in range(16))

for hook in [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry.endswith("/rank/hook")]:
    sys.path.append(hook)
    __import__("numapin_hook_parts")._install_on_use(torch.utils.data.dataloader)

def whose(thing):
    return type(thing).__module__.partition(".")[0] + "." + type(thing).__name__

def tell(loader, iterator, batches):
    rows = sorted(int(row[0]) for batch in batches for row in batch)
    found = {"RANK": os.environ.get("RANK", "0"), "loader": whose(loader), "iterator": whose(iterator), "rows": rows}
    os.write(1, (json.dumps(found) + "\\n").encode())  # in one piece: ranks share the pipe
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare({loader})
batches = list(loader)
tell(loader.base_dataloader, iter(loader.base_dataloader), batches)
if accelerator.num_processes > 1: torch.distributed.destroy_process_group()
"""

LIGHTNING = """
import logging
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
import pytorch_lightning

seen = []

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2048, 1)
    def training_step(self, batch):
        seen.append(batch)
        return self.layer(batch).sum()
    predict_step = training_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

trainer = pytorch_lightning.Trainer(
    accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
"""


COPYING = DATA + ACCELERATE.format(loader="torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)")
FITTING = f"""{DATA}{LIGHTNING}
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)
trainer.fit(Module(), loader)
assert trainer.train_dataloader is not loader
assert type(trainer.train_dataloader.sampler).__name__ == 'DistributedSampler'
tell(trainer.train_dataloader, iter(trainer.train_dataloader), seen)
torch.distributed.destroy_process_group()
"""


def lines_about_loaders(done: Done) -> list[str]:
    return re.findall(r"^numapin: .*DataLoader.*$", done.err, re.MULTILINE)


def told(done: Done) -> list[dict[str, Any]]:
    return [dict(line) for line in done.json_lines()]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    """Give a process that has imported torch and the installed frameworks, but not numapin."""
    frameworks = [name for name in ("accelerate", "pytorch_lightning") if find_spec(name) is not None]
    made = Forker(environment(), ("torch.utils.data", *frameworks))
    yield made
    made.close()


def alone(forker: Forker, folder: Path, text: str) -> Done:
    script(folder, text)
    command = CommandLine(module="train", arguments=(), environ=environment(), cwd=str(folder))
    status, out, err = forker.call(command, limit_s=120)
    assert status == 0, err
    return Done(status=status, out=out, err=err)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(COPYING, marks=needs_accelerate, id="accelerate"),
        pytest.param(FITTING, marks=needs_lightning, id="lightning"),
    ],
)
def test_under_the_option(tmp_path: Path, forker: Forker, text: str) -> None:
    """The loaders that a framework makes of an unmodified script's use slots in each rank, and one line says so."""
    done = numapin(*RUN, script(tmp_path, forker.client(script(tmp_path, text)), "starts_train.py"))
    assert done.status == 0, done.err
    found = told(done)
    assert [rank["loader"] for rank in found] == ["torch.DataLoader"] * 2
    assert all(rank["iterator"].startswith("numapin.") for rank in found)
    assert sorted([*found[0]["rows"], *found[1]["rows"]]) == list(range(16))  # one shard per rank, none lost
    assert len(lines_about_loaders(done)) == 1


@needs_accelerate
class TestAccelerate:
    """`Accelerator.prepare`, which makes a plain torch DataLoader as a copy."""

    def test_copy_of_our_loader(self, tmp_path: Path, forker: Forker) -> None:
        """Without the option, the copy of a numapin.DataLoader still uses slots, and a line says so."""
        loader = "__import__('numapin').DataLoader(Stream(), batch_size=2, num_workers=1)"
        done = alone(forker, tmp_path, DATA + ACCELERATE.format(loader=loader))
        (found,) = told(done)
        assert (found["loader"], found["rows"]) == ("torch.DataLoader", list(range(16)))
        assert found["iterator"].startswith("numapin.")
        assert len(lines_about_loaders(done)) == 1

    @needs_torchdata
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_stateful_copy(self, tmp_path: Path, forker: Forker, num_workers: int) -> None:
        """The copy of a numapin.StatefulDataLoader is torchdata's, and takes the path if it has workers."""
        text = ACCELERATE.replace(
            "Accelerator(cpu=True)",
            "Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))",
        ).format(loader=f"__import__('numapin').StatefulDataLoader(Data(), batch_size=2, num_workers={num_workers})")
        done = alone(forker, tmp_path, f"from accelerate.utils import DataLoaderConfiguration\n{DATA}{text}")
        (found,) = told(done)
        assert found["loader"] == "torchdata.StatefulDataLoader"
        assert found["iterator"].startswith("numapin." if num_workers else "torchdata.")
        assert found["rows"] == list(range(16))

    def test_other_loaders_stay_torchs(self, tmp_path: Path, forker: Forker) -> None:
        """A torch DataLoader next to numapin's, with the same dataset and batch sampler, is not taken for a copy."""
        text = (
            "import numapin\n"
            "ours = numapin.DataLoader(Data(), batch_size=2, num_workers=1)\n"
            "theirs = torch.utils.data.DataLoader(ours.dataset, batch_sampler=ours.batch_sampler, num_workers=1)\n"
            "list(ours)\n"
            "tell(theirs, iter(theirs), list(theirs))\n"
        )
        (found,) = told(alone(forker, tmp_path, DATA + text))
        assert found["iterator"] == "torch._MultiProcessingDataLoaderIter"

    def test_skip_first_batches(self, tmp_path: Path, forker: Forker) -> None:
        """A copy of the copy, which resuming mid-epoch makes, uses slots too, and is not reported again."""
        loader = "__import__('numapin').DataLoader(Data(), batch_size=2, num_workers=1)"
        text = (
            f"{ACCELERATE.format(loader=loader)}"
            "rest = accelerator.skip_first_batches(loader, 3)\n"
            "tell(rest.base_dataloader, iter(rest.base_dataloader), list(rest))\n"
        )
        done = alone(forker, tmp_path, DATA + text)
        first, rest = told(done)
        assert (first["rows"], rest["rows"]) == (list(range(16)), list(range(6, 16)))
        assert all(found["iterator"].startswith("numapin.") for found in (first, rest))
        assert len(lines_about_loaders(done)) == 1


@needs_lightning
@pytest.mark.parametrize("where", ["argument", "hook"])
@pytest.mark.parametrize("loader", ["DataLoader", pytest.param("StatefulDataLoader", marks=needs_torchdata)])
def test_lightnings_second_loader(tmp_path: Path, forker: Forker, loader: str, where: str) -> None:
    """The loader for prediction is one of numapin's with all arguments of the first, including numapin's own.

    Lightning reads them from `vars(loader)` if the loader is an argument, and from the recorded call of
    `__init__` if it was created in a hook.
    """
    text = (
        "import numapin\n"
        "def make():\n"
        f"    return numapin.{loader}(Data(), batch_size=2, num_workers=1, timeout=50, prefetch_factor=3,\n"
        "        device=None, pinned_budget=1 << 20, node=0, strict=False, cast={torch.float64: torch.float32})\n"
        "class Hooked(Module):\n"
        "    def predict_dataloader(self): return make()\n"
        "first = make()\n"
        f"trainer.predict(Module(), first) if {where == 'argument'} else trainer.predict(Hooked())\n"
        "again = trainer.predict_dataloaders\n"
        "assert again is not first\n"
        f"assert type(again) is numapin.{loader}\n"
        "names = 'num_workers timeout prefetch_factor device pinned_budget node strict cast'\n"
        "cast = {torch.float64: torch.float32}\n"
        "assert [getattr(again, name) for name in names.split()] == [1, 50, 3, None, 1 << 20, 0, False, cast]\n"
        "assert again.batch_sampler.batch_size == 2\n"
        "tell(again, iter(again), seen)\n"
    )
    (found,) = told(alone(forker, tmp_path, DATA + LIGHTNING + text))
    assert found["iterator"].startswith("numapin.")
    assert found["rows"] == list(range(16))
