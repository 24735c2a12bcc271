"""Draft checkpoints in the two forms people exchange, speculators' and EAGLE's, read into one anatomy.

speculators: `layers.0.*`, the layer's fields nested under `transformer_layer_config`, layer ids as vLLM counts them.
EAGLE (SafeAILab's code, SpecForge, SGLang): `midlayer.*`, flat Llama fields, `architectures: ["LlamaForCausalLMEagle3"]`,
layer ids under `eagle_config`, usually one lower. Both hold d2t as offsets: verifier id = draft id + d2t[draft id].

Layer ids here are the workbook's (see `verifier`): id k is the residual stream after k decoder layers.
Shapes: H hidden, A captured layers, V verifier vocabulary, D draft vocabulary, I MLP width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.errors import DamagedInput, DataError, MissingInput
from helpers.files import shown

SPECULATORS, EAGLE = "speculators", "eagle"
# The second is vLLM's own name for the same class; SGLang does not know it.
EAGLE_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Anatomy:
    """What a draft is made of, whichever form its checkpoint has."""

    layer_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    layer_ids: tuple[int, ...] | None  # None: the usual 2, n/2, n-3
    rope: dict[str, Any]  # rope_type, rope_theta and whatever the type needs
    max_positions: int
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None  # None: full attention in every layer
    flags: dict[str, bool]
    aux: int  # A


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder. Raises MissingInput, DamagedInput."""
    path = folder / "config.json"
    if not path.is_file():
        what = "no draft checkpoint: config.json is not there"
        raise MissingInput(what, where=shown(folder), do="give the folder of a draft, or run notebook 04")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedInput(f"config.json cannot be read: {error}", where=shown(path), do="copy or export the draft again") from error
    if not isinstance(config, dict):
        raise DamagedInput("config.json is no JSON object", where=shown(path), do="copy or export the draft again")
    return config


def kind(config: dict[str, Any], where: str) -> str:
    """`speculators` or `eagle`. Raises DataError: neither, or another algorithm than EAGLE-3."""
    if "speculators_model_type" in config:
        if config["speculators_model_type"] != "eagle3":
            what = f"a speculators draft of type {config['speculators_model_type']!r}, not eagle3"
            raise DataError(what, where=where, do="give an EAGLE-3 draft")
        return SPECULATORS
    names = config.get("architectures") or []
    if set(names) & set(EAGLE_ARCHITECTURES):
        return EAGLE
    raise DataError(
        f"architectures {names} is neither a speculators draft nor one of {', '.join(EAGLE_ARCHITECTURES)}",
        where=where,
        do="give an EAGLE-3 draft of Llama layers; other layers than Llama's and Qwen3's have no counterpart in speculators",
    )


def eagle_layer_ids(config: dict[str, Any], verifier_layers: int | None, where: str) -> tuple[int, ...] | None:
    """Layer ids of an EAGLE config in the workbook's counting; None when it names none (the usual three).

    At the top level ids are read as they are, as vLLM does. Under `eagle_config` two countings are in use: the index of
    the layer whose output is meant (SpecForge, one lower than ours) and ours. A first id of 1 means the former, as in
    SGLang since its pull request 25454; the usual three ids, or one equal to the verifier's depth, are told by value.

    Raises:
        DataError: the ids could mean either, or the two places contradict each other.
    """
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    for found in (top, nested):
        if found is not None and (not isinstance(found, list) or not found or not all(type(i) is int for i in found)):
            raise DataError(f"{IDS} {found!r} is no list of layer ids", where=where, do="write a list of integers")
    lower = tuple(i + 1 for i in nested or ())
    if top:
        if nested and tuple(top) not in (tuple(nested), lower):
            raise DataError(f"{IDS} {top}, but {nested} under eagle_config", where=where, do="correct the one that is wrong")
        return tuple(top)
    if not nested:
        return None
    if nested[0] == 1:
        return lower
    n = verifier_layers
    if n is not None and (nested == [2, n // 2, n - 3] or nested[-1] == n):
        return tuple(nested)
    raise DataError(
        f"{IDS} {nested} under eagle_config can mean the states after {nested} or after {list(lower)} layers",
        where=where,
        do=f"write the right ones as {IDS} at the top level of config.json, where they are read as they are",
    )


def rope_of(fields: dict[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 writes it (`rope_parameters`) or as 4 did (`rope_theta`, `rope_scaling`)."""
    scaling = fields.get("rope_scaling") or {}
    rope = dict(fields.get("rope_parameters") or scaling)
    if isinstance(rope.get("sliding_attention"), dict):  # one per kind of layer; the library takes this one too
        rope = dict(rope["sliding_attention"])
    rope.setdefault("rope_type", rope.pop("type", None) or "default")
    rope.pop("type", None)
    rope["rope_theta"] = float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    return rope


def anatomy(config: dict[str, Any], where: str, verifier_layers: int | None = None) -> Anatomy:
    """Read a config of either form.

    Raises:
        DataError: a field it cannot do without is missing or no number, the layers are of a kind speculators does not
            have, or the verifier's states have another width than the draft's.
    """
    form = kind(config, where)
    fields = config if form == EAGLE else config.get("transformer_layer_config")
    if not isinstance(fields, dict):
        raise DataError("transformer_layer_config is missing", where=where, do="export the draft again")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    bad = [name for name in needed if type(fields.get(name)) is not int or fields[name] < 1]
    if bad:
        what = f"config.json lacks {', '.join(bad)} (or they are no positive integers)"
        raise DataError(what, where=where, do="correct it, or export the draft again")
    layer_type = fields.get("model_type", "llama")
    if layer_type not in (("llama",) if form == EAGLE else ("llama", "qwen3")):
        do = "an EAGLE draft has Llama layers, a speculators one Llama's or Qwen3's"
        raise DataError(f"layers of type {layer_type!r}", where=where, do=do)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    width = config.get("target_hidden_size")
    if width not in (None, hidden):
        raise DataError(
            f"target_hidden_size {width} is not the draft's hidden size {hidden}", where=where, do="speculators' model needs them equal"
        )
    nested = config.get("eagle_config") or {}
    flags = {name: bool(nested.get(name, config.get(name)) if name == "norm_before_fc" else config.get(name)) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise DataError("norm_before_fc and fc_norm are both on", where=where, do="a draft has one of them at most: correct its config")
    ids = eagle_layer_ids(config, verifier_layers, where) if form == EAGLE else config.get(IDS)
    sliding = "sliding_attention" in (fields.get("layer_types") or [])
    return Anatomy(
        layer_type=layer_type,
        layers=fields.get("num_hidden_layers", 1),
        hidden=hidden,
        intermediate=fields["intermediate_size"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or hidden // heads,
        vocab=fields["vocab_size"],
        draft_vocab=config.get("draft_vocab_size") or fields["vocab_size"],
        layer_ids=tuple(ids) if ids else None,
        rope=rope_of(fields),
        max_positions=fields["max_position_embeddings"],
        attention_bias=bool(fields.get("attention_bias")),
        mlp_bias=bool(fields.get("mlp_bias")),
        sliding_window=fields.get("sliding_window") if sliding else None,
        flags=flags,
        aux=len(ids) if ids else 3,
    )


def expected(a: Anatomy) -> dict[str, tuple[int, ...]]:
    """Names (speculators') and shapes of all tensors of a draft with this anatomy."""
    h, q, kv = a.hidden, a.heads * a.head_dim, a.kv_heads * a.head_dim
    found = {"embed_tokens.weight": (a.vocab, h), "fc.weight": (h, a.aux * h), "norm.weight": (h,), "lm_head.weight": (a.draft_vocab, h)}
    if a.draft_vocab != a.vocab:
        found |= {"d2t": (a.draft_vocab,), "t2d": (a.vocab,)}
    if a.flags["norm_before_fc"]:
        found["input_norm.weight"] = (a.aux * h,)
    if a.flags["fc_norm"]:
        found |= {f"fc_norm.{i}.weight": (h,) for i in range(a.aux)}
    for i in range(a.layers):
        wide = h if i else 2 * h  # the first layer joins embeddings and states
        parts = {"q_proj": (q, wide), "k_proj": (kv, wide), "v_proj": (kv, wide), "o_proj": (h, q)}
        layer = {f"self_attn.{name}.weight": shape for name, shape in parts.items()}
        if a.attention_bias:
            layer |= {f"self_attn.{name}.bias": shape[:1] for name, shape in parts.items()}
        if a.layer_type == "qwen3":
            layer |= {f"self_attn.{name}.weight": (a.head_dim,) for name in ("q_norm", "k_norm")}
        mlp = {"gate_proj": (a.intermediate, h), "up_proj": (a.intermediate, h), "down_proj": (h, a.intermediate)}
        layer |= {f"mlp.{name}.weight": shape for name, shape in mlp.items()}
        if a.mlp_bias and a.layer_type == "llama":
            layer |= {f"mlp.{name}.bias": shape[:1] for name, shape in mlp.items()}
        norms = ["input_layernorm", "post_attention_layernorm"] + ([] if i else ["hidden_norm"])
        layer |= {f"{name}.weight": (h,) for name in norms}
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def library_name(name: str) -> str:
    """A tensor's name as speculators has it: EAGLE's `midlayer`, with or without Automodel's `model.` before it."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def listing(names: list[str], limit: int = 6) -> str:
    """Names in order, cut after `limit`."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def faults(shapes: dict[str, tuple[int, ...]], a: Anatomy, optional: set[str] = frozenset()) -> list[str]:
    """What is wrong with a set of tensors (speculators' names): one line each for missing, unknown and mis-shaped ones."""
    wanted, lines = expected(a), []
    if missing := sorted(wanted.keys() - shapes.keys() - optional):
        lines.append(f"missing: {listing(missing)}")
    if unknown := sorted(shapes.keys() - wanted.keys()):
        lines.append(f"unknown: {listing(unknown)}")
    wrong = [f"{n} {list(shapes[n])}, expected {list(s)}" for n, s in wanted.items() if n in shapes and tuple(shapes[n]) != s]
    if wrong:
        lines.append(f"mis-shaped: {listing(wrong)}")
    return lines
