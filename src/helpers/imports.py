"""A draft trained elsewhere as the library's Eagle3DraftModel: speculators checkpoints, and EAGLE's naming (SpecForge, SGLang).

`load` is called as `draft.load` is, and gives what it gives, so notebook 05 measures a foreign draft as it does its own.
Nothing is left to chance: transformers would fill a missing tensor with random numbers after a warning, so every missing,
unknown or mis-shaped one is named and refused.

Shapes: H hidden, V verifier vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from helpers import contract, draft, formats, verifier, weights
from helpers.errors import DamagedInput, DataError
from helpers.files import shown
from helpers.formats import EAGLE, IDS, Anatomy

# Buffers that some trainers save and every reader computes; the library's copies of the verifier's norm and head.
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def load(folder: Path, verifier_folder: Path | str, *, attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Load a draft of either form, with the verifier's embeddings, and its head where the draft has none of its own.

    Args:
        folder: holds config.json and model.safetensors, shards of it, or pytorch_model.bin.
        verifier_folder: the verifier it drafts for, as it lies here.
        attention: implementation of the library's forward; None takes `draft.json`'s if it is there, else sdpa.

    Returns:
        an Eagle3DraftModel in evaluation mode, its draft vocabulary in rising order of the verifier's ids.

    Raises:
        MissingInput: no checkpoint there.
        DataError: it is no EAGLE-3 draft, not this verifier's, or tensors are missing, unknown or mis-shaped.
        DamagedInput: it cannot be read, holds more than tensors, or NaN.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    where = shown(folder)
    target = verifier.text_config(AutoConfig.from_pretrained(str(verifier_folder)))
    raw = formats.read_config(folder)
    a = formats.anatomy(raw, shown(folder / "config.json"), target.num_hidden_layers)
    _require_verifier(a, target, where)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.tensors(folder).items():
        known = formats.library_name(name)
        if known.endswith(_IGNORED):
            continue
        if known in found:
            raise DataError(f"two tensors for {known}", where=where, do="remove the layer that is not meant")
        found[known] = tensor
    d2t, t2d = _maps(found, a, where)
    optional = {"embed_tokens.weight", "d2t", "t2d"} | ({"lm_head.weight"} if a.draft_vocab == a.vocab else set())
    if lines := formats.faults({name: tuple(t.shape) for name, t in found.items()}, a, optional):
        raise DataError(
            "the tensors are not those of config.json:\n  - " + "\n  - ".join(lines), where=where, do="correct or export it again"
        )
    bad = [name for name, t in found.items() if t.is_floating_point() and not torch.isfinite(t).all()]
    if bad:
        raise DamagedInput(f"NaN or infinity in {formats.listing(bad)}", where=where, do="train or export it again")
    if attention is None:
        side = folder / draft.SIDE_FILE
        attention = draft.library_attention(json.loads(side.read_text(encoding="utf-8"))["attention"]) if side.is_file() else "sdpa"
    config = _config(raw, a, folder, verifier_folder, attention)
    config.eagle_aux_hidden_state_layer_ids = list(a.layer_ids or verifier.default_layer_ids(target.num_hidden_layers))
    model = draft.build(config, d2t, t2d)
    model.load_state_dict(found, strict=False)
    return draft.in_dtype(model, dtype).eval()


def _require_verifier(a: Anatomy, target: Any, where: str) -> None:
    """Refuse a draft whose sizes or layer ids are not this verifier's."""
    problems = []
    if (a.hidden, a.vocab) != (target.hidden_size, target.vocab_size):
        problems.append(f"width {a.hidden} and vocabulary {a.vocab}, the verifier has {target.hidden_size} and {target.vocab_size}")
    if a.layer_ids is not None and not 0 <= min(a.layer_ids) <= max(a.layer_ids) <= target.num_hidden_layers:
        problems.append(f"reads layers {list(a.layer_ids)}, the verifier has {target.num_hidden_layers}")
    if problems:
        raise DataError(
            f"the draft was made for another verifier: {'; '.join(problems)}", where=where, do="give the verifier it was trained for"
        )


def _maps(found: dict[str, torch.Tensor], a: Anatomy, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Take d2t and t2d out of `found`, checked, with the head's rows put in rising order of the verifier's ids.

    The library takes the verifier's rows by the mask t2d, that is in rising order, so a head in another order would be
    compared with the wrong targets. t2d follows from d2t, so it may be absent.
    """
    d2t, t2d = found.pop("d2t", None), found.pop("t2d", None)
    if a.draft_vocab == a.vocab:
        if d2t is not None and d2t.any():
            raise DataError(
                "d2t maps ids although the draft has the whole vocabulary", where=where, do="set draft_vocab_size, or remove d2t"
            )
        return torch.zeros(a.vocab, dtype=torch.long), torch.ones(a.vocab, dtype=torch.bool)
    if bad := contract.failed(contract.map_rows(d2t, t2d, a)):
        raise DataError("the vocabulary maps are wrong:\n  - " + "\n  - ".join(bad), where=where, do="correct the draft's d2t")
    if len(d2t) != a.draft_vocab:
        raise DataError(
            f"d2t has {len(d2t)} entries, draft_vocab_size is {a.draft_vocab}", where=where, do="correct the draft's config or d2t"
        )
    ids = torch.arange(a.draft_vocab) + d2t.long()
    order = ids.argsort()
    head = found.get("lm_head.weight")
    if head is not None and len(head) == a.draft_vocab:
        found["lm_head.weight"] = head[order]
    mask = torch.zeros(a.vocab, dtype=torch.bool)
    mask[ids] = True
    return ids[order] - torch.arange(a.draft_vocab), mask


def _config(raw: dict[str, Any], a: Anatomy, folder: Path, verifier_folder: Path | str, attention: str) -> Any:
    """The library's config of a draft of either form."""
    if formats.kind(raw, shown(folder)) != EAGLE:
        from speculators.models.eagle3 import Eagle3SpeculatorConfig

        config = Eagle3SpeculatorConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = attention
        config.speculators_config.verifier.name_or_path = str(verifier_folder)
        return config
    same = ("hidden_act", "rms_norm_eps", "initializer_range", "bos_token_id", "eos_token_id", "sliding_window", "layer_types")
    layer = {name: raw[name] for name in same if raw.get(name) is not None}
    layer |= {
        "model_type": "llama",
        "num_hidden_layers": a.layers,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "rope_parameters": a.rope,
        "max_position_embeddings": a.max_positions,
        "vocab_size": a.vocab,
        "tie_word_embeddings": False,
        "attention_bias": a.attention_bias,
        "mlp_bias": a.mlp_bias,
    }
    proposal = {"transformer_layer_config": layer, "draft_vocab_size": a.draft_vocab, "speculative_tokens": 3}
    proposal |= {name: value for name, value in a.flags.items() if name != "fc_norm"}
    proposal[IDS] = None  # `load` sets it
    config = draft.speculator_config(proposal, verifier_folder, attention)
    config.fc_norm = a.flags["fc_norm"]
    return config
