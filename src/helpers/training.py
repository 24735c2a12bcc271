"""speculators' `Trainer`, made to run here: one shim, one subclass, no second copy of its loop.

What is changed and why:
- the library refuses or breaks on a CPU: `library_shim`;
- it keeps checkpoints and optimiser state in bfloat16: `checkpoints`;
- AdamW's betas and the clip are fixed in its code: set here after it has built the optimisers, and before they step;
- it picks the best epoch by loss: ours by accept length predicted on held-out rows, since acceptance can fall while the
  loss still falls;
- a NaN in a stored row or in a gradient ends its runs "OK" with every parameter NaN: here it stops and is named.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from helpers import checkpoints, files, library_shim, ttt
from helpers.acceptance import predicted_accept_length
from helpers.errors import DamagedInput, DataError
from helpers.params import Parameters

# --- data --------------------------------------------------------------------------------------------------------


class Preparation:
    """What happens to a row on its way into a batch: the library's shift and, in training, two choices.

    With `every_position` the loss is taken at prompt positions too: the verifier's distribution is known there as well,
    and the draft's keys and values at them are computed anyway.

    `noise_std` puts Gaussian noise on the hidden states, off at 0. Up to 0.8 speculators had `AddUniformNoise` and
    `AddGaussianNoise` transforms; 0.9.0 dropped them without a successor. EAGLE-1 drew from U(-0.1, 0.1). The draw uses
    torch's global generator, which every epoch seeds.
    """

    def __init__(self, noise_std: float = 0.0, every_position: bool = False):
        self.noise_std, self.every_position = noise_std, every_position

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        from speculators.models.eagle3.data import shift_batch

        if self.every_position:
            row = row | {"loss_mask": torch.ones_like(row["loss_mask"])}
        row = shift_batch(row)
        if self.noise_std:
            states = row["hidden_states"]
            row["hidden_states"] = states + (torch.randn(states.shape) * self.noise_std).to(states.dtype)
        return row


def dataset(folder: Path, parameters: Parameters, split: str) -> Any:
    """The library's dataset over a stored folder, for "train" or "val", that stops at a damaged row and names it."""
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset
    from speculators.train.graceful_shutdown import TrainingInterruptedError

    class Checked(ArrowDataset):
        width: int | None = None  # of the first row read: a shard with other layers would only fail deep in the model

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
            found, hidden = row["hidden_states"].shape[1], row["verifier_last_hidden_states"].shape[1]
            self.width = self.width or found
            if found != self.width:
                layers = f"{found // hidden} layers beside the last, other rows {self.width // hidden}"
                raise DamagedInput(f"a stored row holds {layers}", where=where, do=mend)
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
    """Packed batches of `train_batch_tokens`, by the library's sampler and collate function.

    Raises:
        DataError: a row is longer than a batch, or no token is supervised.
    """
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    if max(data.approx_lengths) > parameters.train_batch_tokens:
        raise DataError(
            f"a row of {max(data.approx_lengths)} tokens does not fit train_batch_tokens {parameters.train_batch_tokens}, "
            "and the library would cut it silently",
            where="parameter train_batch_tokens",
            do=f"raise it to {max(data.approx_lengths)} or more",
        )
    if not any(bool(row["loss_mask"][1:].any()) for row in data.data.select_columns("loss_mask")):
        split = "training" if train else "held-out"
        raise DataError(
            f"no token of the {len(data)} {split} conversations is supervised: the loss would be 0 and look like the best",
            where="loss_mask of 01_extraction/dataset",
            do="look at the mask in notebook 01; with few conversations, raise heldout_share",
        )
    sampler = MultipackDistributedBatchSamplerV2(parameters.train_batch_tokens, data.approx_lengths, 1, 0, seed=parameters.seed)
    # held-out rows keep their mask and their states: answers are what a draft is judged by
    prepared = Preparation(parameters.noise_std, parameters.train_on_prompts) if train else Preparation()
    collate = CollateFn(parameters.train_batch_tokens, hidden_size, dtype=data.hidden_states_dtype, preprocess=prepared)
    return DataLoader(data, batch_sampler=sampler, collate_fn=collate)


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
    facts: dict[str, Any] | None = None,
) -> Any:
    """The `Trainer` subclass, ready to run; it resumes from `folder/checkpoints` if one is complete there.

    Args:
        model: a draft from `draft.build` with `draft.library_attention(attention)`.
        attention: the choice of notebook 03, stored with every draft saved; `ttt` binds our step, others leave the library's.
        on_curve: called with all curve rows after each epoch (a live figure).
        facts: what the kept draft should say of itself besides epoch, step and accept length (where it started).

    Raises:
        DataError: the stored rows hold other layers than the draft reads.
    """
    library_shim.shim(device)
    from speculators.train import trainer as library

    if parameters.recompute:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    width = train_loader.dataset[0]["hidden_states"].shape[1]
    if width != model.fc.in_features:
        raise DataError(
            f"the stored rows hold {width // model.hidden_size} layers of {model.hidden_size}, "
            f"the draft reads {model.fc.in_features // model.hidden_size}",
            where="01_extraction/dataset/hidden_states",
            do="run the notebooks from 01 on with one list of aux_layer_ids",
        )
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
        muon_weight_decay=parameters.train_muon_weight_decay,
        scheduler_type=parameters.train_scheduler,
        scheduler_warmup_ratio=parameters.train_warmup_ratio,
        hidden_states_dtype=torch.bfloat16 if parameters.verifier_dtype != "float32" else torch.float32,
        log_freq=1,
    )

    class DraftTrainer(library.Trainer):
        def setup_trainer(self):
            self.checkpointer = checkpoints.exact_checkpointer(config.save_path)
            super().setup_trainer()
            self.curve, self.best, self.best_epoch = [], 0.0, -1
            if self.checkpointer.previous_epoch != -1:
                state = self._load_training_state()
                self.curve, self.best, self.best_epoch = state["curve"], state["best"], state["best_epoch"]
                report(f"going on after epoch {self.current_epoch} of {config.num_epochs} from a complete checkpoint")

        def setup_model(self):
            self.device_type = device.type
            self.norm_at_start = self.model.norm.weight.detach().clone()
            super().setup_model()

        def setup_optimizer(self):
            super().setup_optimizer()
            for optimizer in self.optimizers:
                if isinstance(optimizer, torch.optim.AdamW):
                    for group in optimizer.param_groups:
                        group["betas"] = tuple(parameters.train_betas)

        def _optimizers_step(self):
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            # the library has clipped by now; a gradient that was not finite still is not
            if grads and not torch.isfinite(torch.nn.utils.get_total_norm(grads)):
                raise DataError(
                    f"the gradient of step {self.global_step} is not finite, so the weights were left as they were",
                    where="notebook 04, training",
                    do="lower the learning rate; if it persists, `workbook check` looks for damaged rows",
                )
            if parameters.train_clip < 1.0:  # the library has cut at 1.0 already
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), parameters.train_clip)
            super()._optimizers_step()

        def train_epoch(self, epoch, *, step_callback=None):
            torch.manual_seed(parameters.seed + epoch)  # noise then depends on the epoch alone, resumed or not
            super().train_epoch(epoch, step_callback=step_callback)

        def record(self, entry: dict[str, Any]) -> None:
            """Keep one logged training step (called by the library's metric log)."""
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
                made = {"epoch": epoch, "step": self.global_step, "predicted_accept_length": reached}
                checkpoints.save_best(self.model, folder / "best", attention, made | (facts or {}))
            state = {"epoch": epoch, "local_step": 0, "global_step": self.global_step}
            state |= {"best": self.best, "best_epoch": self.best_epoch, "curve": self.curve}
            self.checkpointer.write(epoch, self.model, self.optimizers, self.schedulers, state)

    if attention == "ttt":
        ttt.bind(model, _full_head(model, device, config.hidden_states_dtype))
    made = DraftTrainer(model, config, train_loader, val_loader)
    library_shim.collect(library.metric_logger, made.record)
    return made


def _full_head(model: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The verifier's whole output matrix in the run's dtype, for accuracies against its full vocabulary."""
    from speculators.utils.loading import load_model_layers

    found = load_model_layers(["lm_head.weight", "embed_tokens.weight"], model.config.speculators_config.verifier.name_or_path)
    return found.get("lm_head.weight", found["embed_tokens.weight"]).to(device, dtype)


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
