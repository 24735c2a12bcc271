"""The registry of attention implementations: where this transformers keeps it, what is in it, and what None does.

Models look an implementation up by `config._attn_implementation`. That attribute is no field of the config: it is neither
saved nor read, so a config made from a dict has None there, and what None does depends on the version and on who asks.
speculators adds an entry of its own. Ours, `ttt`, is no entry: it replaces the draft's whole training step.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from helpers import decoding, ttt
from helpers.errors import AttentionError

NAME = "ALL_ATTENTION_FUNCTIONS"
# Where models look it up comes second: if it ever moves from the first place, the llama layers still have to reach it.
PLACES = ("transformers.modeling_utils", "transformers.models.llama.modeling_llama")
WRONG_PLACE = "transformers.utils.generic"
LIBRARY_PLACE = "speculators.models.attention"


class Found(NamedTuple):
    """The live registry: where it was found, the mapping, and every place looked at with what was there."""

    where: str
    mapping: Any
    tried: list[dict[str, str]]


def _look(place: str) -> tuple[Any, str]:
    try:
        found = getattr(importlib.import_module(place), NAME)
    except (ImportError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"
    return found, f"{len(found)} entries"


def find() -> Found:
    """The registry this transformers looks implementations up in.

    Raises:
        AttentionError: nowhere under transformers.
    """
    where, mapping, tried = "", None, []
    loaded = [m for m in sorted(sys.modules) if m.startswith("transformers.") and NAME in vars(sys.modules[m])]
    for place in dict.fromkeys([*PLACES, *loaded]):
        if mapping is not None and place not in PLACES:
            break
        found, what = _look(place)
        if found is not None and mapping is not None:
            what = "the same object" if found is mapping else f"another object, {what}"
        elif found is not None:
            where, mapping = place, found
        tried.append({"place": f"{place}.{NAME}", "found": what})
    if mapping is None:
        raise AttentionError(f"no {NAME} in {', '.join(PLACES)}", where="transformers", do="install a version between 5.0 and 5.19")
    return Found(where, mapping, tried)


def wrong_place() -> dict[str, str]:
    """Where the registry never was, tried: `from transformers.utils.generic import …`."""
    statement = f"from {WRONG_PLACE} import {NAME}"
    try:
        exec(statement, {})  # the very line people write, with the error they see
        what = "there"
    except ImportError as error:
        what = f"{type(error).__name__}: {str(error).split(' (')[0]}"
        there = [n for n in vars(importlib.import_module(WRONG_PLACE)) if "Interface" in n]
        what += f"; what is there: {', '.join(there)}, the class a registry is made of" if there else ""
    return {"place": statement, "found": what}


def _origin(module: str) -> str:
    return {"transformers": "transformers", "speculators": "speculators", "helpers": "this workbook"}.get(module.split(".")[0], "you")


def registry() -> list[dict[str, Any]]:
    """Every implementation that could be tried, one row each: name, function, whose it is, which registry holds it, its use.

    `eager` stands in no registry (it is each layer's own fallback), nor does `ttt`.
    """
    theirs = find()
    library = getattr(importlib.import_module(LIBRARY_PLACE), NAME)
    decoding.register()
    rows = []
    for name in dict.fromkeys([*theirs.mapping, *library]):
        function = (theirs.mapping if name in theirs.mapping else library)[name]
        held = [label for label, mapping in (("transformers", theirs.mapping), ("speculators", library)) if name in mapping]
        use = {decoding.GROUPED: "decoding", "paged|eager": "serving"}.get(name, "training")
        rows.append(_row(name, function, " and ".join(held), use))
    llama = importlib.import_module(PLACES[1])
    rows.append(_row("eager", llama.eager_attention_forward, "none: the layer's fallback", "training"))
    return [*rows, _row("ttt", ttt.forward, "none: replaces the step", "training")]


def _row(name: str, function: Any, held: str, use: str) -> dict[str, Any]:
    module, called = getattr(function, "__module__", "?"), getattr(function, "__qualname__", type(function).__name__)
    return {"implementation": name, "from": _origin(module), "module": module, "function": called, "registry": held, "made for": use}


# --- the None trap -----------------------------------------------------------------------------------------------


class _Heard(logging.Handler):
    """Keeps the warnings of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _short(text: str, limit: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 2] + " …"


def watched(what: str, compute: Callable[[], str]) -> dict[str, str]:
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
        said = [*heard.lines, *(str(w.message) for w in caught if "compile" not in str(w.message))]
        happened += "".join(f"; warned: {_short(text, 120)}" for text in dict.fromkeys(said))
    except Exception as error:  # the finding
        happened = f"{type(error).__name__}: {_short(str(error))}"
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

    def draft() -> str:
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
        watched(f"{kind.__name__}.from_dict(…)._attn_implementation", lambda: repr(config()._attn_implementation)),
        watched(f"{name}DecoderLayer, forward", layer),
        watched(f"{name}Model, built", model),
        watched("speculators' Eagle3DraftModel, built", draft),
    ]
    if drafts:
        rows += [watched("its forward without gradient", forward), watched("its training step", backward)]
    return rows
