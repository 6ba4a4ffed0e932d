"""Hugging Face's Trainer under `numapin run`, without changes: no import of numapin.

    numapin run --dataloader=numapin examples/train_transformers.py                       one rank per GPU, NCCL
    numapin run --nproc-per-node 2 --dataloader=numapin examples/train_transformers.py    on the CPU, gloo

Expect one line that reports numapin's data path, and one line per epoch, with a loss that falls from about 1.7 to 0.04.
The Trainer detects the ranks by their environment. Needs `pip install transformers accelerate`. The model is a tiny
GPT-2 with random weights, which learns to count; nothing is downloaded.
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class Counting(Dataset):
    """Sequences of 16 consecutive numbers below 32, as the Trainer takes them."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class PrintLoss(TrainerCallback):
    """Print the loss of each epoch on the main process."""

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the Trainer's interface
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Print what the Trainer logs once per epoch."""
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"epoch {logs['epoch']:.0f}: loss {float(logs['loss']):.4f}", flush=True)


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()

    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=arguments.epochs,
                per_device_train_batch_size=64,
                learning_rate=5e-3,
                dataloader_num_workers=1,
                ddp_find_unused_parameters=False,
                logging_strategy="epoch",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Counting(),
            callbacks=[PrintLoss()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
