"""The draft: its config proposed from the verifier's, its model built, saved and loaded with the attention choice.

speculators does not save `_attn_implementation`, freezes the head again at every load and falls back to flex attention,
which has no backward on a CPU. `save` therefore writes `draft.json` beside the checkpoint, and `load` applies it.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers import files, formats, weights
from helpers.errors import DamagedInput, MissingInput, ParameterError
from helpers.params import Parameters

SIDE_FILE = "draft.json"


def propose(verifier_config: Any, parameters: Parameters, layer_ids: list[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The draft's config as a plain dict, and a table of every field with where it came from.

    Args:
        verifier_config: the language model's config (nested ones unwrapped before).

    Raises:
        ParameterError: draft vocabulary above the verifier's, or heads that do not divide.
    """
    v = verifier_config
    vocabulary = v.vocab_size
    if parameters.draft_vocab_size > vocabulary:
        raise ParameterError(
            f"draft_vocab_size {parameters.draft_vocab_size} is larger than the verifier's vocabulary of {vocabulary}",
            where="parameter draft_vocab_size",
            do=f"choose at most {vocabulary}; notebook 02 shows what each size costs",
        )
    heads = parameters.draft_heads or v.num_attention_heads
    kv_heads = parameters.draft_kv_heads or getattr(v, "num_key_value_heads", None) or heads
    head_dim = v.hidden_size // heads if parameters.draft_heads else getattr(v, "head_dim", None) or v.hidden_size // heads
    if heads % kv_heads or (parameters.draft_heads and v.hidden_size % heads):
        raise ParameterError(
            f"{heads} heads, {kv_heads} key-value heads and hidden size {v.hidden_size} do not divide",
            where="parameters draft_heads, draft_kv_heads",
            do="heads must divide the hidden size, key-value heads must divide heads",
        )
    width = parameters.draft_intermediate_size or getattr(v, "intermediate_size", None) or 3 * v.hidden_size
    rope = dict(getattr(v, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    own = "verifier's config"
    fields: list[tuple[str, Any, str]] = [
        ("model_type", parameters.draft_layer_type, "parameter draft_layer_type"),
        ("num_hidden_layers", parameters.draft_layers, "parameter draft_layers"),
        ("hidden_size", v.hidden_size, f"{own}: the draft reads its states and shares its head"),
        ("intermediate_size", width, "parameter draft_intermediate_size" if parameters.draft_intermediate_size else own),
        ("num_attention_heads", heads, "parameter draft_heads" if parameters.draft_heads else own),
        ("num_key_value_heads", kv_heads, "parameter draft_kv_heads" if parameters.draft_kv_heads else own),
        ("head_dim", head_dim, "hidden size by heads" if parameters.draft_heads else own),
        ("hidden_act", getattr(v, "hidden_act", "silu"), own),
        ("rms_norm_eps", float(v.rms_norm_eps), own),
        ("rope_parameters", rope, f"{own}: another base gives other positions at decoding than at training"),
        ("max_position_embeddings", v.max_position_embeddings, f"{own}: a shorter one collapses beyond it"),
        ("vocab_size", vocabulary, f"{own}: the draft embeds every token the verifier emits"),
        ("tie_word_embeddings", False, "the draft's head has the draft vocabulary only"),
        ("attention_bias", False, "fixed"),
        ("mlp_bias", False, "fixed"),
        ("use_cache", True, "fixed"),
    ]
    if parameters.draft_window:
        kind = ["sliding_attention"] * parameters.draft_layers
        fields += [("sliding_window", parameters.draft_window, "parameter draft_window"), ("layer_types", kind, "parameter draft_window")]
    if parameters.draft_layer_type == "qwen3":
        fields = [f for f in fields if f[0] != "mlp_bias"]
        if parameters.draft_window:  # its config drops the window otherwise
            fields.append(("use_sliding_window", True, "parameter draft_window"))
    config = {name: value for name, value, _ in fields}
    rows = [{"field": name, "value": value, "from": origin} for name, value, origin in fields]
    extra = [
        ("draft_vocab_size", parameters.draft_vocab_size, "parameter draft_vocab_size, measured in notebook 02"),
        ("eagle_aux_hidden_state_layer_ids", layer_ids, "what notebook 01 stored"),
        ("norm_before_residual", parameters.norm_before_residual, "parameter"),
        ("norm_before_fc", parameters.norm_before_fc, "parameter"),
        ("fc_norm", parameters.fc_norm, "parameter"),
        ("norm_output", parameters.norm_output, "parameter"),
        ("speculative_tokens", parameters.speculative_tokens, "parameter speculative_tokens, read by vLLM"),
    ]
    rows += [{"field": name, "value": value, "from": origin} for name, value, origin in extra]
    return {"transformer_layer_config": config, **{name: value for name, value, _ in extra}}, rows


def speculator_config(proposal: dict[str, Any], verifier_folder: Path | str, attention: str) -> Any:
    """`Eagle3SpeculatorConfig` from a proposal, with the attention implementation set on the layer config."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    layer = dict(proposal["transformer_layer_config"])
    layer_config = AutoConfig.for_model(layer.pop("model_type"), **layer)
    layer_config._attn_implementation = attention
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=proposal["draft_vocab_size"],
        norm_before_residual=proposal["norm_before_residual"],
        norm_before_fc=proposal["norm_before_fc"],
        fc_norm=proposal.get("fc_norm", False),
        norm_output=proposal["norm_output"],
        eagle_aux_hidden_state_layer_ids=proposal["eagle_aux_hidden_state_layer_ids"],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=proposal["speculative_tokens"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(verifier_folder)),
        ),
    )


def build(config: Any, d2t: np.ndarray | torch.Tensor, t2d: np.ndarray | torch.Tensor, *, seed: int = 0, train_head: bool = False) -> Any:
    """A new draft in float32 with the verifier's embeddings, head and final norm loaded and frozen.

    Args:
        train_head: let the head learn from there, as the paper does; the targets keep a frozen copy of the verifier's rows.
    """
    from speculators.models.eagle3 import Eagle3DraftModel

    torch.manual_seed(seed)
    model = Eagle3DraftModel(config)
    model.load_vocab_mappings(torch.as_tensor(t2d), torch.as_tensor(d2t))
    with warnings.catch_warnings():
        # a missing final norm only warns there, and 1.0 in its place spoils every target
        warnings.filterwarnings("error", message="Could not find final norm")
        model.load_verifier_weights()
    model.lm_head.weight.requires_grad_(train_head)  # the library freezes it at every load of the verifier's weights
    return model.float()


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    """Parameter counts of a draft by part: name, parameters, trained or frozen."""
    parts: dict[tuple[str, bool], int] = {}
    for name, parameter in model.named_parameters():
        key = name.split(".")[0], parameter.requires_grad
        parts[key] = parts.get(key, 0) + parameter.numel()
    return [
        {"part": part, "parameters": count, "trained": trained} for (part, trained), count in sorted(parts.items(), key=lambda x: -x[1])
    ]


def save(model: Any, folder: Path, *, attention: str, facts: dict[str, Any] | None = None) -> None:
    """Write a self-contained draft: checkpoint (weights in the model's dtype), config, and `draft.json`.

    Args:
        attention: the choice of notebook 03, which the checkpoint's config cannot hold.
        facts: whatever should travel with it (data fingerprint, training step, predicted accept length).
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    files.write_json(folder / SIDE_FILE, {"attention": attention, "facts": facts or {}})


def load(folder: Path, verifier_folder: Path | str, *, attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Load a draft with the attention it was made for; `imports.load` reads those that were made elsewhere.

    Args:
        verifier_folder: where the verifier is now; it replaces the path of the machine the draft was trained on.
        attention: another implementation than the stored one (decoding uses its own).

    Raises:
        MissingInput: no checkpoint there. DamagedInput: it holds NaN, lacks its side file, or has other tensors than its
        config tells (each is named).
    """
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    if not (folder / "config.json").is_file():
        raise MissingInput("no draft checkpoint", where=files.shown(folder), do="run notebook 04")
    # transformers fills a missing tensor with random numbers after a warning, and refuses a mis-shaped one in pages of text
    shapes = {name: shape for name, (_, shape) in weights.headers(folder).items()}
    anatomy = formats.anatomy(formats.read_config(folder), files.shown(folder / "config.json"))
    if lines := formats.faults(shapes, anatomy):
        what = "the tensors are not those of config.json:\n  - " + "\n  - ".join(lines)
        raise DamagedInput(what, where=files.shown(folder), do="run notebook 04 again")
    side = folder / SIDE_FILE
    if attention is None and not side.is_file():
        raise DamagedInput(
            f"the draft lacks {SIDE_FILE}, so its attention choice is unknown",
            where=files.shown(folder),
            do="run notebook 04 again, or name the attention",
        )
    chosen = attention or library_attention(json.loads(side.read_text())["attention"])
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = chosen
    config.speculators_config.verifier.name_or_path = str(verifier_folder)
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        raise DamagedInput(f"NaN or infinity in {', '.join(bad[:4])}", where=files.shown(folder), do="run notebook 04 again")
    return in_dtype(model, dtype).eval()


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The draft with its weights in `dtype` and its RoPE frequencies as they were.

    `model.to(bfloat16)` rounds the frequencies too, by up to 0.4 %: with a base of 100,000 and heads of 64 an angle at
    position 500 is then off by up to 0.7 radian. Training, vLLM and SGLang keep them in float32.
    """
    kept = dict(model.rotary_emb.named_buffers())
    model.to(dtype)
    for name, frequencies in kept.items():
        setattr(model.rotary_emb, name, frequencies)
    return model


def verifier_ids(model: Any) -> torch.Tensor:
    """The verifier's id of every id of the draft [D]: draft id + d2t, or the same where the draft has the whole vocabulary."""
    ids = torch.arange(model.draft_vocab_size, device=model.fc.weight.device)
    return ids if model.d2t is None else ids + model.d2t.to(ids.device)


def library_attention(choice: str) -> str:
    """What the library's own forward runs with: `ttt` is our step, beside which the library's layers keep sdpa."""
    return "sdpa" if choice == "ttt" else choice
