"""speculators' `Trainer`, made to run here: one shim, one subclass, no second copy of its loop.

What is changed and why:
- the library refuses or breaks on a CPU (device, timer, autocast): `shim` sets these in one place, guarded by version;
- it keeps checkpoints and optimiser state in bfloat16: ours are exact, and written whole or not at all;
- it picks the best epoch by loss: ours by accept length predicted on held-out rows, since acceptance can fall while the
  loss still falls;
- a NaN in a stored row or in a gradient ends its runs "OK" with every parameter NaN: here it stops and is named.
"""

from __future__ import annotations

import copy
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from helpers import draft, files, ttt
from helpers.acceptance import predicted_accept_length
from helpers.errors import DamagedInput, DataError, WorkbookError
from helpers.params import Parameters

SUPPORTED = ("0.9",)  # speculators versions whose private names the shim was written against


def shim(device: torch.device) -> None:
    """Point the library's trainer at `device`; on a CPU also replace its accelerator calls.

    Raises:
        WorkbookError: another speculators version, whose private names may mean something else.
    """
    import importlib.metadata

    version = importlib.metadata.version("speculators")
    if not version.startswith(SUPPORTED):
        raise WorkbookError(
            f"speculators {version} is installed; the training shim was written against {' and '.join(SUPPORTED)}",
            where="helpers.training.shim",
            do="install the pinned version (constraints.txt), or read the Trainer's seams again and extend SUPPORTED",
        )
    from speculators.train import checkpointer, distributed, trainer

    # one quiet line per interval is ours to print; its progress bars would flood a rendered page
    trainer.tqdm = lambda iterable, **_: iterable
    logging.getLogger("speculators").setLevel(logging.WARNING)
    if device.type == "cpu":
        distributed._local_rank = "cpu"
        checkpointer.get_current_device = lambda: "cpu"
        trainer._StepTimer = _CpuTimer
    else:
        torch.cuda.set_device(device.index or 0)
        distributed._local_rank = device.index or 0


class _CpuTimer:
    """The library's step timer without accelerator synchronisation."""

    def __init__(self, enabled: bool = False):
        self.enabled, self._marks = enabled, {}

    def reset(self, enabled: bool) -> None:
        self.enabled, self._marks = enabled, {}

    def mark(self, name: str) -> None:
        self._marks[name] = time.perf_counter()

    def mark_value(self, name: str, value: float) -> None:
        self._marks[name] = value

    def now(self) -> float:
        return time.perf_counter()

    def profile(self, num_tokens: int) -> dict[str, float] | None:
        if not self.enabled:
            return None
        seconds = self._marks["opt"] - self._marks["start"]
        fetch = self._marks["fetch"] - self._marks["start"]
        return {"tokens_per_s": num_tokens / seconds, "step_ms": seconds * 1000, "fetch_frac": fetch / seconds}


# --- data --------------------------------------------------------------------------------------------------------


class Noise:
    """Gaussian noise on the hidden states of a training row, off at 0.

    Up to 0.8 speculators had `AddUniformNoise` and `AddGaussianNoise` transforms; 0.9.0 dropped them without a
    successor. EAGLE-1 drew from U(-0.1, 0.1). The draw uses torch's global generator, which every epoch seeds.
    """

    def __init__(self, std: float):
        self.std = std

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        from speculators.models.eagle3.data import shift_batch

        row = shift_batch(row)
        if self.std:
            states = row["hidden_states"]
            row["hidden_states"] = states + (torch.randn(states.shape) * self.std).to(states.dtype)
        return row


def dataset(folder: Path, parameters: Parameters, split: str) -> Any:
    """The library's dataset over a stored folder, for "train" or "val", that stops at a damaged row and names it."""
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset
    from speculators.train.graceful_shutdown import TrainingInterruptedError

    class Checked(ArrowDataset):
        def _get_raw_data(self, index: int) -> Any:
            where = files.shown(Path(folder) / "hidden_states" / f"hs_{self._map_to_file_idx(index)}.safetensors")
            mend = "run notebook 01 again: it redoes the rows that are damaged and keeps the others"
            try:
                row = super()._get_raw_data(index)
            except TrainingInterruptedError:  # a signal that came while reading is no damage
                raise
            except Exception as error:  # a truncated shard raises from several libraries
                raise DamagedInput(f"a stored row cannot be read: {error}", where=where, do=mend) from error
            if not isinstance(row, dict):
                raise DamagedInput(f"a stored row cannot be used: {row.reason}", where=where, do=mend)
            for name in ("hidden_states", "verifier_last_hidden_states"):
                if not torch.isfinite(row[name]).all():
                    raise DamagedInput(f"{name} holds NaN or infinity", where=where, do=mend)
            return row

    return Checked(
        max_len=parameters.train_batch_tokens,
        datapath=folder,
        transfer=FileTransfer(Path(folder) / "hidden_states"),
        on_missing="raise",
        train_ratio=1.0 - parameters.heldout_share,
        split=split,
        hidden_states_dtype=torch.bfloat16 if parameters.verifier_dtype != "float32" else torch.float32,
    )


def loader(data: Any, parameters: Parameters, hidden_size: int, *, train: bool) -> DataLoader:
    """Packed batches of `train_batch_tokens`, by the library's sampler and collate function."""
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    if max(data.approx_lengths) > parameters.train_batch_tokens:
        raise DataError(
            f"a row of {max(data.approx_lengths)} tokens does not fit train_batch_tokens {parameters.train_batch_tokens}, "
            "and the library would cut it silently",
            where="parameter train_batch_tokens",
            do=f"raise it to {max(data.approx_lengths)} or more",
        )
    sampler = MultipackDistributedBatchSamplerV2(parameters.train_batch_tokens, data.approx_lengths, 1, 0, seed=parameters.seed)
    collate = CollateFn(
        parameters.train_batch_tokens, hidden_size, dtype=data.hidden_states_dtype, preprocess=Noise(parameters.noise_std if train else 0.0)
    )
    return DataLoader(data, batch_sampler=sampler, collate_fn=collate)


# --- checkpoints -------------------------------------------------------------------------------------------------


def _exact_checkpointer(path: str) -> Any:
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
                if old.name.isdigit() and int(old.name) < epoch:
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


# --- the trainer -------------------------------------------------------------------------------------------------


def make_trainer(
    model: Any,
    parameters: Parameters,
    train_loader: DataLoader,
    val_loader: DataLoader,
    folder: Path,
    *,
    attention: str,
    device: torch.device,
    report: Callable[[str], None] = print,
    on_curve: Callable[[list[dict[str, Any]]], None] | None = None,
) -> Any:
    """The `Trainer` subclass, ready to run; it resumes from `folder/checkpoints` if one is complete there.

    Args:
        model: a draft from `draft.build` with `draft.library_attention(attention)`.
        attention: the choice of notebook 03, stored with every draft saved; `ttt` binds our step, others leave the library's.
        on_curve: called with all curve rows after each epoch (a live figure).
    """
    shim(device)
    from speculators.train import trainer as library

    if parameters.recompute:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    steps = step_arguments(parameters)
    config = library.TrainerConfig(
        lr=parameters.train_learning_rate,
        num_epochs=parameters.train_epochs,
        save_path=str(folder / "checkpoints"),
        resume_from_checkpoint=True,
        train_call_kwargs=steps,
        val_call_kwargs=steps,
        optimizer=parameters.train_optimizer,
        weight_decay=parameters.train_weight_decay,
        muon_lr=parameters.train_muon_learning_rate,
        muon_weight_decay=parameters.train_weight_decay,
        scheduler_type=parameters.train_scheduler,
        scheduler_warmup_ratio=parameters.train_warmup_ratio,
        hidden_states_dtype=torch.bfloat16 if parameters.verifier_dtype != "float32" else torch.float32,
        log_freq=1,
    )

    class DraftTrainer(library.Trainer):
        def setup_trainer(self):
            self.checkpointer = _exact_checkpointer(config.save_path)
            super().setup_trainer()
            self.curve, self.best, self.best_epoch = [], 0.0, -1
            if self.checkpointer.previous_epoch != -1:
                state = self._load_training_state()
                self.curve, self.best, self.best_epoch = state["curve"], state["best"], state["best_epoch"]
                report(f"going on after epoch {self.current_epoch} of {config.num_epochs} from a complete checkpoint")

        def setup_model(self):
            self.device_type = device.type
            super().setup_model()

        def _optimizers_step(self):
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            # the library has clipped by now; a gradient that was not finite still is not
            if grads and not torch.isfinite(torch.nn.utils.get_total_norm(grads)):
                raise DataError(
                    f"the gradient of step {self.global_step} is not finite, so the weights were left as they were",
                    where="notebook 04, training",
                    do="lower the learning rate; if it persists, `workbook check` looks for damaged rows",
                )
            super()._optimizers_step()

        def train_epoch(self, epoch, *, step_callback=None):
            torch.manual_seed(parameters.seed + epoch)  # noise then depends on the epoch alone, resumed or not
            super().train_epoch(epoch, step_callback=step_callback)

        def record(self, entry: dict[str, Any]) -> None:
            """Keep one logged training step (called by the log handler below)."""
            train, profile, rate = entry["train"], entry["profile"] or {}, entry["lr"]
            row = {"step": entry["global_step"], "epoch": entry["epoch"]}
            row |= {k: v for k, v in train.items() if k.startswith(("loss", "full_acc", "cond_acc"))}
            row |= {
                "learning_rate": max(rate.values()) if isinstance(rate, dict) else rate,
                "tokens_per_second": profile.get("tokens_per_s"),
            }
            self.curve.append(row)

        def val_epoch(self, epoch):
            found = super().val_epoch(epoch)
            accuracies = [found.get(f"cond_acc_{k}_epoch", 0.0) for k in range(parameters.train_ttt_steps)]
            found["predicted_accept_length"] = predicted_accept_length(accuracies)
            last = self.curve[-1]
            last |= {"heldout_loss": found["loss_epoch"], "heldout_accept_length": found["predicted_accept_length"]}
            last |= {f"heldout_cond_acc_{k}": a for k, a in enumerate(accuracies)}
            recent = [r for r in self.curve if r["epoch"] == epoch]
            speed = sorted(r["tokens_per_second"] or 0.0 for r in recent)[len(recent) // 2]
            report(
                f"epoch {epoch + 1}/{config.num_epochs}  step {self.global_step}  loss {sum(r['loss'] for r in recent) / len(recent):.3f}"
                f"  held-out {found['loss_epoch']:.3f}  predicted accept length {found['predicted_accept_length']:.3f}"
                f" ({' '.join(f'{a:.3f}' for a in accuracies)})  lr {last['learning_rate']:.1e}  {speed:.0f} tok/s"
            )
            if on_curve is not None:
                on_curve(self.curve)
            return found

        def maybe_save_checkpoint(self, epoch, local_step=0):
            """Nothing before validation, whose verdict belongs into the checkpoint; an interrupt, which the library would swallow, goes on.

            Otherwise a notebook whose cell was stopped would go on to its next cell with a half-trained draft.
            """
            if epoch == "interrupted":
                raise KeyboardInterrupt

        def maybe_update_best(self, epoch, val_metrics):
            reached = val_metrics["predicted_accept_length"]
            if reached > self.best:
                self.best, self.best_epoch = reached, epoch
                _save_best(
                    self.model, folder / "best", attention, {"epoch": epoch, "step": self.global_step, "predicted_accept_length": reached}
                )
            state = {"epoch": epoch, "local_step": 0, "global_step": self.global_step}
            state |= {"best": self.best, "best_epoch": self.best_epoch, "curve": self.curve}
            self.checkpointer.write(epoch, self.model, self.optimizers, self.schedulers, state)

    if attention == "ttt":
        ttt.bind(model, _full_head(model, device, config.hidden_states_dtype))
    made = DraftTrainer(model, config, train_loader, val_loader)
    handler = _Collector(made)
    library.metric_logger.handlers = [handler]
    library.metric_logger.setLevel(logging.INFO)
    library.metric_logger.propagate = False
    return made


class _Collector(logging.Handler):
    """Hands the library's metric log to the trainer's curve."""

    def __init__(self, trainer: Any):
        super().__init__()
        self.trainer = trainer

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.trainer.record(record.msg)


def _full_head(model: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The verifier's whole output matrix in the run's dtype, for accuracies against its full vocabulary."""
    from speculators.utils.loading import load_model_layers

    found = load_model_layers(["lm_head.weight", "embed_tokens.weight"], model.config.speculators_config.verifier.name_or_path)
    return found.get("lm_head.weight", found["embed_tokens.weight"]).to(device, dtype)


def _save_best(model: Any, folder: Path, attention: str, facts: dict[str, Any]) -> None:
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


def autocast(device: torch.device, parameters: Parameters) -> Any:
    """The compute dtype of a run as a context: bfloat16 over float32 weights, or plain float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=parameters.verifier_dtype != "float32")


def step_arguments(parameters: Parameters) -> dict[str, Any]:
    """Keyword arguments of the draft's forward in training: steps, decay, loss."""
    from speculators.losses import resolve_loss_config

    return {
        "ttt_steps": parameters.train_ttt_steps,
        "ttt_step_loss_decay": parameters.train_step_decay,
        "loss_config": resolve_loss_config(parameters.train_loss, "eager"),
    }
