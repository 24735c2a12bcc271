"""What a diagnosis reads, each thing once: a run's folder, the loaded verifier and draft, the records of the evaluation."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import audit, forced, manifest, reference
from helpers.chains import ChainRecord
from helpers.conversations import Tokenised, read_prompts
from helpers.errors import MissingInput
from helpers.extraction import load_conversations, load_rows, split
from helpers.files import shown
from helpers.params import STAGES, Parameters
from helpers.probe import packed
from helpers.verifier import Verifier

AUDIT_ROWS = 3  # rows passed through the verifier again
TRAINING_ROWS, HELDOUT_ROWS = 32, 64  # most rows of each split whose chains are walked
FIRST = 40  # tokens of the first document of the row that attention is tried on


class Finding(NamedTuple):
    """Whether a cause is ruled out (None: cannot be judged), the figure it was judged by, and what mends it."""

    passed: bool | None
    figure: str
    do: str = ""


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly apart."""
    return sorted({i * count // min(count, most) for i in range(min(count, most))})


class Probed(NamedTuple):
    """A float32 copy of the draft, a packed row of random states, and the plain float64 result of both."""

    model: Any
    row: dict[str, torch.Tensor]
    steps: int
    wanted: reference.Result


@dataclass
class Evidence:
    """The run a diagnosis looks at.

    Args:
        model: the draft as it decodes, from `draft.load`; it is only read.
        records: chain records of the evaluation.
        draft_folder: its checkpoint; None takes the one that notebook 04 kept.
        least_tokens: supervised training tokens below which there are too few.
    """

    parameters: Parameters
    verifier: Verifier
    model: Any
    records: Sequence[ChainRecord]
    draft_folder: Path | None = None
    least_tokens: int = 0
    _chains: dict[str, list[ChainRecord]] = field(default_factory=dict)

    def stage(self, number: int) -> Path:
        """Folder of a stage, by its number from 1."""
        return manifest.run_folder(self.parameters) / STAGES[number - 1]

    def results(self, number: int) -> dict[str, Any]:
        """Results that a stage recorded. Raises MissingInput."""
        return manifest.Stage(STAGES[number - 1], self.stage(number), self.parameters).results

    def file(self, number: int, *names: str) -> Path:
        """A file of a stage. Raises MissingInput."""
        path = self.stage(number).joinpath(*names)
        if not path.exists():
            raise MissingInput(f"no {path.name} in {path.parent.name}", where=shown(path), do=f"run notebook {STAGES[number - 1][:2]}")
        return path

    def read(self, number: int, *names: str) -> Any:
        """A JSON file of a stage. Raises MissingInput."""
        return json.loads(self.file(number, *names).read_text(encoding="utf-8"))

    @property
    def checkpoint(self) -> Path:
        """Folder of the draft. Raises MissingInput."""
        return self.draft_folder or self.file(4, "best")

    @cached_property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        """(input ids, loss mask) of every stored row."""
        return load_rows(self.file(1, "dataset"))

    @cached_property
    def talks(self) -> list[dict[str, Any]]:
        """The conversation behind every row."""
        return load_conversations(self.file(1, "conversations.jsonl"))

    @cached_property
    def tools(self) -> dict[str, Any]:
        """Functions offered to the model, by prompt: the prompt file alone keeps them."""
        return {p.id: p.tools for p in read_prompts(self.parameters.prompts_train).rows}

    @cached_property
    def training(self) -> int:
        """Rows trained on, the first ones; the others are held out."""
        try:
            return int(self.results(1)["training_rows"])
        except (MissingInput, KeyError):
            return split(len(self.rows), self.parameters.heldout_share)

    @cached_property
    def audited(self) -> list[dict[str, Any]]:
        """Stored rows held against a fresh pass of the verifier."""
        found = [Tokenised(list(ids), list(mask), "stored", id=str(i)) for i, (ids, mask) in enumerate(self.rows)]
        claimed = list(self.results(1)["layer_ids"])
        return audit.audit(self.verifier, found, self.stage(1) / "dataset", claimed, sample=AUDIT_ROWS, seed=self.parameters.seed)

    def places(self, which: str) -> list[int]:
        """Rows of "training" or "heldout" that are looked at."""
        first, last, most = (0, self.training, TRAINING_ROWS) if which == "training" else (self.training, len(self.rows), HELDOUT_ROWS)
        return [first + i for i in spread(last - first, most)]

    def walked(self, places: Sequence[int]) -> list[ChainRecord]:
        """Chain records of rows, as the loaded draft would have their last answers accepted."""
        names = [(t["id"], t["category"]) for t in self.talks]
        return forced.chains(self.model, self.rows, places, self.stage(1) / "dataset", self.parameters.speculative_tokens, names=names)

    def chains(self, which: str) -> list[ChainRecord]:
        """Chain records of a sample of "training" or "heldout" rows, walked once."""
        if which not in self._chains:
            self._chains[which] = self.walked(self.places(which))
        return self._chains[which]

    @cached_property
    def probed(self) -> Probed:
        """What attention is tried on: random states, so that no fault of the data reaches it. The embedding is shared, not copied."""
        embedding = self.model.embed_tokens.weight
        model = copy.deepcopy(self.model, {id(embedding): embedding})
        for name, child in model.named_children():
            if name != "embed_tokens":
                child.float().requires_grad_(name not in ("lm_head", "verifier_lm_head", "verifier_norm"))
        shape = {"hidden_size": model.hidden_size, "vocab_size": model.config.transformer_layer_config.vocab_size}
        ids = self.model.config.eagle_aux_hidden_state_layer_ids
        proposal = {"transformer_layer_config": shape, "eagle_aux_hidden_state_layer_ids": ids}
        row = packed([FIRST, 24], 8, proposal, model.fc.weight.device, self.parameters.seed)
        steps = self.parameters.train_ttt_steps
        return Probed(model, row, steps, reference.run(model, row, steps))
