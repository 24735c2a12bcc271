"""The attention setting that gets lost: None in a config made from a dict, forgotten by the library's save and load.

`config._attn_implementation` is no field of the config: it is neither written nor read, and what None does depends on the
version and on who asks. Nothing here is told from memory: each row is an attempt made when the function is called.
"""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers import draft, embedded, params, ttt
from helpers.probe import packed, said, shortened


class _Heard(logging.Handler):
    """Keeps the warnings of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _watched(what: str, compute: Callable[[], str]) -> dict[str, str]:
    """A row of the table: what was tried, and what it said, warned of or raised."""
    from transformers.utils.logging import warning_once

    getattr(warning_once, "cache_clear", lambda: None)()  # it warns once per process, and this page may run twice
    logger, heard = logging.getLogger("transformers"), _Heard()
    level, kept = logger.level, logger.handlers[:]
    logger.handlers = [heard]
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            happened = compute()
        warned = [*heard.lines, *(str(w.message) for w in caught if "compile" not in str(w.message))]
        happened += "".join(f"; warned: {shortened(text, 120)}" for text in dict.fromkeys(warned))
    except Exception as error:  # the finding
        happened = said(error)
    finally:
        logger.handlers = kept
        logger.setLevel(level)
    return {"tried": what, "happened": happened}


def none_trap(layer_config: dict[str, Any], device: torch.device | str = "cpu") -> list[dict[str, str]]:
    """What a draft config made from a dict does here: each attempt made now, on this device, with these versions.

    Args:
        layer_config: `transformer_layer_config` of a draft. Its vocabulary is cut to 256 tokens, which changes nothing here.

    Returns:
        Rows {tried, happened}: the config's value, transformers' own layer and model, speculators' draft forward and backward.
    """
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[layer_config["model_type"]]
    module = importlib.import_module(f"transformers.models.{layer_config['model_type']}.modeling_{layer_config['model_type']}")
    prefix = kind.__name__.removesuffix("Config")
    tokens, width = 128, layer_config["hidden_size"]

    def config() -> Any:
        return kind.from_dict(layer_config | {"vocab_size": 256})

    def layer() -> str:
        used: list[str] = []
        fallback = module.eager_attention_forward
        module.eager_attention_forward = lambda *a, **k: (used.append("eager"), fallback(*a, **k))[1]
        try:
            made, x = config(), torch.randn(1, tokens, width, device=device)
            angles = getattr(module, f"{prefix}RotaryEmbedding")(made).to(device)(x, torch.arange(tokens, device=device)[None])
            getattr(module, f"{prefix}DecoderLayer")(made, 0).to(device)(x, position_embeddings=angles)
        finally:
            module.eager_attention_forward = fallback
        return f"runs, with {used[0] if used else 'another implementation'}"

    def model() -> str:
        made = AutoModel.from_config(config())
        return f"builds, and fills in {made.config._attn_implementation}"

    drafts: list[Any] = []

    def build() -> str:
        made = config()
        drafts.append(Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=made, draft_vocab_size=256)).to(device).train())
        for parameter in drafts[0].parameters():  # embedding and head wait for a verifier's weights and hold NaN
            torch.nn.init.normal_(parameter, std=0.02)
        return f"builds, and puts {made._attn_implementation} in its place without a word"

    def step() -> torch.Tensor:
        ones = torch.ones(1, tokens, dtype=torch.long, device=device)
        states = torch.randn(1, tokens, 4 * width, device=device).split([3 * width, width], -1)
        arguments = {"document_ids": ones, "loss_mask": ones.bool(), "verifier_last_hidden_states": states[1], "ttt_steps": 2}
        with torch.compiler.set_stance("force_eager"):  # the finding is the same, and nothing is compiled for it
            return drafts[0](states[0], ones, loss_config=losses, **arguments)[1]

    def forward() -> str:
        with torch.no_grad():
            return "runs" if torch.isfinite(step()) else "runs, and gives no number"

    def backward() -> str:
        step().backward()
        return "runs"

    from speculators.losses import resolve_loss_config

    losses, name = resolve_loss_config("kl_div", "eager"), f"transformers' {prefix}"
    rows = [
        _watched(f"{kind.__name__}.from_dict(…)._attn_implementation", lambda: repr(config()._attn_implementation)),
        _watched(f"{name}DecoderLayer, forward", layer),
        _watched(f"{name}Model, built", model),
        _watched("speculators' Eagle3DraftModel, built", build),
    ]
    if drafts:
        rows += [_watched("its forward without gradient", forward), _watched("its training step", backward)]
    return rows


def after_reload(choice: str) -> list[dict[str, str]]:
    """What becomes of the choice when a draft is saved and loaded, by the library alone and by `draft.load`; tried now.

    A small draft on the tiny verifier stands in: what is written does not depend on its size. Rows {tried, happened}.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig

    verifier = embedded.ensure("tiny")
    config = AutoConfig.from_pretrained(verifier)
    proposal, _ = draft.propose(config, params.Parameters(draft_vocab_size=64), [0, 1, 2])
    few = torch.arange(config.vocab_size) < 64
    loaded: dict[str, Any] = {}

    def load(how: str, make: Callable[[], Any]) -> str:
        loaded[how] = make()
        return f"attention {loaded[how]._attn_impl}" + (", with ttt to be bound in training" if how == "ours" and choice == "ttt" else "")

    def step(how: str) -> str:
        model = loaded[how].train()
        row = packed([128], 0, proposal, torch.device("cpu"), 0)
        if how == "ours" and choice == "ttt":
            ttt.bind(model)
        with torch.compiler.set_stance("force_eager"):
            model(**row, ttt_steps=2, loss_config=resolve_loss_config("kl_div", "eager"))[1].backward()
        return "runs"

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        built = draft.build(draft.speculator_config(proposal, verifier, draft.library_attention(choice)), few[:64].long() * 0, few)
        draft.save(built, folder, attention=choice)
        written = "nothing" if "_attn_implementation" not in (folder / "config.json").read_text() else "it"
        return [
            {"tried": "what config.json holds of it", "happened": written},
            _watched("Eagle3DraftModel.from_pretrained(folder)", lambda: load("library", lambda: Eagle3DraftModel.from_pretrained(folder))),
            _watched("a training step of that, on a CPU", lambda: step("library")),
            {"tried": "what draft.json beside it holds", "happened": json.loads((folder / draft.SIDE_FILE).read_text())["attention"]},
            _watched("helpers.draft.load(folder)", lambda: load("ours", lambda: draft.load(folder, verifier))),
            _watched("a training step of that", lambda: step("ours")),
        ]
