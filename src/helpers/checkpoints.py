"""Checkpoints that are exact and whole: float32 weights and optimiser state to go on from, and the best draft to serve.

The library keeps both in bfloat16, so that its resumed runs differ from uninterrupted ones, and writes file by file into
place, so that a kill can leave half a checkpoint. Here a checkpoint is moved into place when all of it is written.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from helpers import draft, files


def exact_checkpointer(path: str) -> Any:
    """A checkpointer with float32 weights and exact optimiser state, each checkpoint whole or absent."""
    from speculators.train.checkpointer import SingleGPUCheckpointer

    class Exact(SingleGPUCheckpointer):
        def _get_previous_epoch(self) -> int:
            done = (
                [int(d.name) for d in self.path.iterdir() if d.name.isdigit() and (d / "complete").exists()] if self.path.exists() else []
            )
            return max(done, default=-1)

        def write(self, epoch: int, model: Any, optimizers: list, schedulers: list, state: dict[str, Any]) -> None:
            """Save everything into a scratch folder, then move it into place and drop the older checkpoint."""
            with files.atomic(self.path / str(epoch)) as scratch:
                scratch.mkdir(parents=True)
                model.save_pretrained(scratch)
                torch.save([o.state_dict() for o in optimizers], scratch / "optimizer_state_dict.pt")
                torch.save([s.state_dict() for s in schedulers], scratch / "scheduler_state_dict.pt")
                files.write_json(scratch / "training_state.json", state)
                (scratch / "complete").touch()
            for old in self.path.iterdir():
                # a dot stands before the scratch folder of a process that was killed while writing
                if (old.name.isdigit() and int(old.name) < epoch) or old.name.startswith("."):
                    shutil.rmtree(old)

        def _read(self, path: Path) -> Any:
            return torch.load(path, weights_only=True, map_location="cpu")  # the run may have begun on another device

        def load_optimizer_state_dict(self, model, optimizer, float_dtype=None):
            for opt, saved in zip(optimizer, self._read(self.optimizer_path(self.previous_epoch)), strict=True):
                opt.load_state_dict(saved)

        def load_scheduler_state_dict(self, scheduler):
            for one, saved in zip(scheduler, self._read(self.scheduler_path(self.previous_epoch)), strict=True):
                one.load_state_dict(saved)
                # building the scheduler has already moved the rates; the saved ones are the ones to go on with
                for group, rate in zip(one.optimizer.param_groups, one.get_last_lr(), strict=True):
                    group["lr"] = rate

    return Exact(path)


def save_best(model: Any, folder: Path, attention: str, facts: dict[str, Any]) -> None:
    """Replace the best draft: bfloat16 as it is served, written beside and swapped in."""
    head, step = getattr(model, "full_head", None), model.__dict__.pop("forward", None)
    model.full_head = None
    try:
        with files.atomic(folder) as scratch:
            draft.save(copy.deepcopy(model).to(torch.bfloat16), scratch, attention=attention, facts=facts)
    finally:
        model.full_head = head
        if step is not None:
            model.forward = step
