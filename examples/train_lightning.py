"""Lightning's Trainer under `numapin run`, which starts the ranks instead of Lightning's own launcher.

    numapin run examples/train_lightning.py                       one rank per GPU, NCCL
    numapin run --nproc-per-node 2 examples/train_lightning.py    two ranks; without GPUs on the CPU, gloo

Expect one line per epoch, with a loss that falls from about 1.8 to 0.3. Lightning detects the ranks by their
environment and does not start any; `devices` must then be the number of ranks on this machine. Needs
`pip install pytorch-lightning`. Each sample is noise around the center of its class.
"""

import argparse
import os

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import Dataset

import numapin


class Clusters(Dataset):
    """Points in 64 dimensions around one of eight centers; point n is always the same."""

    def __init__(self) -> None:
        self.centers = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return self.centers[index % 8] + 2 * noise, index % 8


class Classifier(lightning.LightningModule):
    """A perceptron that prints its mean loss over all ranks after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of one batch."""
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the loss, which Lightning has already reduced, on rank 0."""
        loss = self.trainer.callback_metrics["loss"]
        self.print(f"epoch {self.current_epoch}: loss {loss.item():.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    num_ranks, num_local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=num_local,
        num_nodes=num_ranks // num_local,
        strategy="ddp",
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pinned = torch.cuda.is_available()
    loader = numapin.DataLoader(Clusters(), 64, shuffle=True, num_workers=1, pin_memory=pinned)
    trainer.fit(Classifier(), loader)  # recreates the loader, still numapin's, with a DistributedSampler


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # after the model is gone: it uses the group until then
