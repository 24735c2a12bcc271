"""A draft with one attention implementation in it, and a row to try it on: what checks and cost measurements share."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from helpers import draft, ttt

Job = dict[str, Any]  # proposal, verifier, steps, lengths, dtype, device, seed, seconds, entries, fork, folder (attention.prepare)
Save = Callable[[dict[str, Any]], None]


def packed(documents: list[int], pad: int, proposal: dict[str, Any], device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """A packed row of random states and tokens as the library's collate function makes it, a third of each document prompt.

    States are numbers that bfloat16 holds exactly, so that both dtypes get the same input. Float32, N = documents + pad.
    """
    layer, aux = proposal["transformer_layer_config"], len(proposal["eagle_aux_hidden_state_layer_ids"])
    draw, total = torch.Generator().manual_seed(seed), sum(documents) + pad

    def states(width: int) -> torch.Tensor:
        return torch.randn(1, total, width, generator=draw).bfloat16().float()

    row = {
        "hidden_states": states(aux * layer["hidden_size"]),
        "verifier_last_hidden_states": states(layer["hidden_size"]),
        "input_ids": torch.randint(0, layer["vocab_size"], (1, total), generator=draw),
        "document_ids": torch.cat([*(torch.full((n,), i) for i, n in enumerate(documents)), torch.full((pad,), -1)])[None],
        "loss_mask": torch.cat([*(torch.arange(n) >= max(8, n // 3) for n in documents), torch.zeros(pad, dtype=torch.bool)])[None],
        "position_ids": torch.cat([*(torch.arange(1, n + 1) for n in documents), torch.zeros(pad, dtype=torch.long)])[None],
    }
    return {name: value.to(device) for name, value in row.items()}


class Probe:
    """A draft with one implementation in it, and what its layers put out at each TTT step."""

    def __init__(self, entry: dict[str, Any], job: Job):
        from speculators.losses import resolve_loss_config

        name, device, proposal = entry["implementation"], torch.device(job["device"]), job["proposal"]
        _known_here(entry)
        config = draft.speculator_config(proposal, job["verifier"], draft.library_attention(name))
        size, vocabulary = proposal["draft_vocab_size"], proposal["transformer_layer_config"]["vocab_size"]
        # which tokens the draft has changes neither time nor memory: the first ones stand in
        model = draft.build(config, torch.zeros(size, dtype=torch.long), torch.arange(vocabulary) < size, seed=job["seed"])
        self.model, self.ours, self.device, self.seen = model.to(device).train(), name == "ttt", device, []
        if self.ours:
            ttt.bind(self.model)
        self.arguments = {"ttt_steps": job["steps"], "loss_config": resolve_loss_config("kl_div", "eager")}
        self.model.norm.register_forward_pre_hook(torch.compiler.disable(lambda _, inputs: self.seen.append(inputs[0].detach())))

    def autocast(self, dtype: str) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=dtype != "float32")

    def loss(self, row: dict[str, torch.Tensor], dtype: str = "float32") -> torch.Tensor:
        """Forward over all steps; in another dtype than float32 under autocast, with states stored in it, as in training."""
        self.seen.clear()
        if dtype != "float32":
            row = {k: v.bfloat16() if v.is_floating_point() else v for k, v in row.items()}
        with self.autocast(dtype):
            return self.model(**row, **self.arguments)[1]

    def step(self, row: dict[str, torch.Tensor], dtype: str = "float32") -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
        """(states per step [rows, H], loss, gradient of every trained parameter) of one training step."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(row, dtype)
        loss.backward()
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.model.named_parameters() if p.requires_grad}
        return self.states(), loss.item(), found

    def states(self) -> list[torch.Tensor]:
        return [x if x.dim() == 2 else x[0] for x in self.seen]

    def places(self, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Positions that `states` has rows for: ours computes the starts alone, the library all."""
        documents = row["document_ids"][0]
        if self.ours:
            return ttt.plan(documents, row["loss_mask"][0], self.arguments["ttt_steps"]).starts
        return torch.arange(len(documents), device=documents.device)


def _known_here(entry: dict[str, Any]) -> None:
    """Registrations of the notebook's process are repeated in this one."""
    from transformers.modeling_utils import AttentionInterface

    name = entry["implementation"]
    if name not in ("ttt", "eager") and name not in AttentionInterface() and entry.get("module"):
        function = getattr(importlib.import_module(entry["module"]), entry["function"])
        AttentionInterface.register(name, function)


def shortened(text: str, limit: int = 160) -> str:
    """Text on one line, cut after `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 2] + " …"


def said(error: BaseException) -> str:
    """An exception as one short line."""
    return shortened(f"{type(error).__name__}: {error}")


def in_words(error: BaseException) -> str:
    """Why an implementation cannot be used, from the exception it raised."""
    text = str(error).lower()
    if "backward on cpu" in text:
        return "no backward on CPU"
    if isinstance(error, ImportError):
        return f"package missing: {error.name or said(error)}"
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return "not enough memory"
    if "block_mask was created" in text or "multiple of 128" in text or "divisible by" in text:
        return "sequence not a multiple of 128"
    if "cuda" in text and not torch.cuda.is_available():
        return "needs CUDA"
    if any(word in text for word in ("mask", "paged", "cache")):
        return "cannot take this mask"
    return said(error)
