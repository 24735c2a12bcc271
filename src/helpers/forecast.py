"""What a training run will take, told before its first step: counts, peak memory, minutes."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Any

import torch

from helpers import step_memory, training, ttt
from helpers.params import Parameters


def expect(trainer: Any, parameters: Parameters, proposal: dict[str, Any]) -> dict[str, Any]:
    """What the run will take, before its first step: steps, tokens, peak memory from its sizes, minutes from a probe of seconds.

    The probe times what every step does (reading a batch, forward and backward, the optimiser on tensors of the trained
    shapes) and what every validation batch does; no weight moves.

    Raises:
        WorkbookError: the memory there is cannot suffice; the message names both numbers.
    """
    sampler = trainer.train_loader.batch_sampler
    plan, device = list(sampler), torch.device(trainer.device_type)
    starts = max(_starts(trainer.train_loader.dataset, batch, parameters) for batch in plan[:64])
    ours = hasattr(trainer.model, "full_head")
    memory = {}
    if ours:  # the library's own attention holds dense masks, whose cost notebook 03 has measured
        held = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        held += trainer.model.full_head.numel() * trainer.model.full_head.element_size()
        found = step_memory.require(step_memory.sizes(proposal, parameters, starts=starts, device=device), device, held=held)
        memory = {"expected peak memory (MB)": round(found["needed"] / 1e6), "free memory (MB)": round((found["free"] + held) / 1e6)}
    seconds = _probe(trainer, parameters, device)
    held_out = len(list(trainer.val_loader.batch_sampler))
    epoch = len(plan) * sum(seconds[k] for k in ("read", "step", "optimiser")) + held_out * (seconds["read"] + seconds["validation"])
    return {
        "conversations": len(trainer.train_loader.dataset),
        "steps": len(plan) * parameters.train_epochs,
        "tokens per epoch": int(sum(sampler.lengths[b].sum() for b in plan)),
        "supervised starts in the fullest batch": starts,
        "trained parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        **memory,
        "seconds per step": seconds["read"] + seconds["step"] + seconds["optimiser"],
        "of it optimiser": seconds["optimiser"],
        "expected minutes": epoch * parameters.train_epochs / 60,
    }


def _starts(data: Any, batch: Sequence[int], parameters: Parameters) -> int:
    """Positions of a batch that the step computes: those with a supervised target within its TTT steps."""
    total = 0
    for row in data.data.select(batch).select_columns("loss_mask"):
        mask = row["loss_mask"][1:].bool() | parameters.train_on_prompts  # shifted as the trainer shifts it
        total += int(ttt.plan(torch.zeros(len(mask), dtype=torch.long), mask, parameters.train_ttt_steps).starts.numel())
    return total


def _probe(trainer: Any, parameters: Parameters, device: torch.device) -> dict[str, float]:
    """Seconds of one batch's reading, step, optimiser and validation: the better of two each."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(work: Any) -> float:
        wait()
        began = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - began

    began = time.perf_counter()
    batches = [next(iter(x)) for x in (trainer.train_loader, trainer.val_loader)]
    read = (time.perf_counter() - began) / 2
    train, val = ({k: v.to(trainer.local_rank) for k, v in b.items() if isinstance(v, torch.Tensor)} for b in batches)

    def step() -> None:
        with training.autocast(device, parameters):
            _, loss, _ = trainer.model(**train, **trainer.config.train_call_kwargs)
        loss.backward()

    def validate() -> None:
        with torch.no_grad(), training.autocast(device, parameters):
            trainer.model(**val, **trainer.config.val_call_kwargs)

    trainer.model.train()
    stepping = min(timed(step) for _ in range(2))
    trainer.model.zero_grad()
    trainer.model.eval()
    validation = min(timed(validate) for _ in range(2))
    trainer.model.train()
    optimiser = 0.0
    for one in trainer.optimizers:
        shapes = collections.Counter(tuple(p.shape) for group in one.param_groups for p in group["params"])
        for shape, count in shapes.items():  # one tensor of each shape: copies of all could be more than there is room for
            weight = torch.nn.Parameter(torch.zeros(shape, device=trainer.local_rank))
            weight.grad = torch.ones_like(weight)
            alike = type(one)([weight], lr=1e-3)
            optimiser += count * min(timed(alike.step) for _ in range(2))
    return {"read": read, "step": stepping, "optimiser": optimiser, "validation": validation}
