"""Where a draft starts: random weights, the verifier's last layers, or a draft that exists.

From the verifier, a draft layer starts as one of its last decoder layers: queries, keys and values read the state half of
their input as the verifier's do, and the embedding half starts at zero; the projection passes the last of the joined states
on. Before training the draft then is that layer, applied to the state it was made for or to one a little below.

From an existing draft (a speculators checkpoint: `best` of another run, or a published one), every trained tensor is taken
over, and what cannot be is named with both shapes. Rows of a trained head follow their tokens into another vocabulary map.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from helpers import draft, files, params, weights
from helpers.errors import DamagedInput, MissingInput, ParameterError
from helpers.params import Parameters
from helpers.verifier import text_config

MEANING = ("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # no shape shows these
NEVER = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "lm_head.weight", "d2t", "t2d")


def start(model: Any, parameters: Parameters) -> dict[str, Any]:
    """Set the trained weights of a freshly built draft as `draft_init` says, in place.

    Args:
        model: from `draft.build`, float32.

    Returns:
        facts to travel with the draft: `draft_init`, tensors set, and for an existing draft the sha256 of its weights.

    Raises:
        ParameterError: tensors or settings that do not fit, all named.
        MissingInput, DamagedInput: no draft there, or NaN in it.
    """
    if parameters.draft_init == "random":
        return {"draft_init": "random", "tensors_set": 0}
    if parameters.draft_init == "verifier":
        found = _from_verifier(model)
        facts = {"draft_init": "verifier"}
    else:
        folder = params.resolve(parameters.draft_init)
        found, facts = _from_draft(model, folder)
    own = dict(model.named_parameters())
    problems = [
        f"{name}: {list(value.shape)} there, {list(own[name].shape)} in this draft"
        for name, value in found.items()
        if value.shape != own[name].shape
    ]
    if problems:
        raise ParameterError(
            f"{len(problems)} tensor(s) do not fit:\n" + "\n".join(f"  - {p}" for p in problems),
            where=f"parameter draft_init: {parameters.draft_init}",
            do="give the draft the same sizes (draft_heads, draft_kv_heads, draft_intermediate_size), or start at random",
        )
    with torch.no_grad():
        for name, value in found.items():
            own[name].copy_(value)
    return facts | {"tensors_set": len(found)}


# --- from the verifier ---------------------------------------------------------------------------------------------


def _from_verifier(model: Any) -> dict[str, torch.Tensor]:
    """The draft's weights by name, from the last decoder layers of the verifier it was built on."""
    from speculators.utils.loading import list_checkpoint_keys, load_model_layers
    from transformers import AutoConfig

    folder = model.config.speculators_config.verifier.name_or_path
    last = text_config(AutoConfig.from_pretrained(folder)).num_hidden_layers
    keys = set(list_checkpoint_keys(folder))
    # layers of a vision tower may carry the same endings, so the language model is where the embeddings are
    embeddings = min((k for k in keys if k.endswith("embed_tokens.weight")), key=len, default=None)
    prefix = (embeddings or "").removesuffix("embed_tokens.weight")
    wanted = {"norm.weight": f"{prefix}norm.weight"}
    for i, layer in enumerate(model.layers):
        there = f"{prefix}layers.{last - len(model.layers) + i}."
        own = {name for name, _ in layer.named_parameters()}
        for name in own - {"hidden_norm.weight"} - ({"input_layernorm.weight"} if i == 0 else set()):
            wanted[f"layers.{i}.{name}"] = there + name
        if i == 0:
            wanted["layers.0.hidden_norm.weight"] = f"{there}input_layernorm.weight"
        biases = [k for k in keys if k.startswith(there) and k.endswith("proj.bias")]
        if biases:
            raise ParameterError(
                f"the verifier's layers have biases the draft's have not: {', '.join(sorted(biases)[:3])}",
                where="parameter draft_init: verifier",
                do="start at random, or from a draft",
            )
    absent = sorted(there for there in wanted.values() if there not in keys)
    if absent:
        raise ParameterError(
            f"the verifier has no {', '.join(absent[:4])}{' …' if len(absent) > 4 else ''}: its layers are built otherwise",
            where="parameter draft_init: verifier",
            do="start at random, or from a draft",
        )
    read = load_model_layers(list(wanted.values()), folder)
    found = {name: read[there].float() for name, there in wanted.items()}
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        found[name] = torch.cat([torch.zeros_like(found[name]), found[name]], dim=1)
    size = model.hidden_size
    found["fc.weight"] = torch.zeros(size, model.fc.in_features)
    found["fc.weight"][:, -size:] = torch.eye(size)
    return found


# --- from a draft --------------------------------------------------------------------------------------------------


def _read(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """All tensors of a checkpoint folder, and one sha256 over its weight files."""
    if not any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file():
        raise MissingInput(
            "no draft checkpoint (config.json and *.safetensors) to start from",
            where=files.shown(folder),
            do="set draft_init to a folder with one; a run that goes on from its own draft needs another name, since its folder is moved",
        )
    tensors, digest = weights.tensors(folder), hashlib.sha256()
    for path in weights.weight_files(folder):
        digest.update(files.file_sha256(path).encode())
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]
    if bad:
        raise DamagedInput(f"NaN or infinity in {', '.join(bad[:4])}", where=files.shown(folder), do="take another checkpoint")
    return tensors, digest.hexdigest()


def _from_draft(model: Any, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, sha = _read(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("speculators_model_type") != "eagle3":
        raise ParameterError(
            "not an EAGLE-3 draft in speculators' form"
            + (" (EAGLE's own names: midlayer)" if any("midlayer" in n for n in tensors) else ""),
            where=files.shown(folder),
            do="convert it to a speculators checkpoint first",
        )
    other = [
        f"{n}: {config[n]!r} there, {getattr(model.config, n)!r} here"
        for n in MEANING
        if n in config and config[n] != getattr(model.config, n)
    ]
    own = {n: p for n, p in model.named_parameters() if n not in NEVER}
    other += [f"{n}: not in the checkpoint" for n in own if n not in tensors]
    other += [f"{n}: not in this draft" for n in tensors if n not in own and n not in NEVER]
    if other:
        raise ParameterError(
            "the draft to start from is built otherwise:\n" + "\n".join(f"  - {line}" for line in sorted(other)),
            where=files.shown(folder),
            do="set the norm flags, layers and aux_layer_ids of this run to the checkpoint's",
        )
    found = {n: tensors[n].float() for n in own}
    head, moved = _head(model, tensors)
    if head is not None:
        found["lm_head.weight"] = head
    return found, {"draft_init": files.shown(folder), "sha256": sha, "head_rows_taken": moved}


def _head(model: Any, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, int]:
    """(head [D, H], rows taken) where the checkpoint's head was trained; None where it holds the verifier's rows."""
    if "lm_head.weight" not in tensors or tensors["lm_head.weight"].shape[1] != model.hidden_size:
        return None, 0
    there = tensors["lm_head.weight"].float()
    tokens = torch.arange(len(there)) + tensors.get("d2t", torch.zeros(len(there), dtype=torch.long))
    place = torch.full((model.verifier_vocab_size,), -1)
    place[draft.verifier_ids(model).cpu()] = torch.arange(model.draft_vocab_size)
    row = place[tokens]
    known = row >= 0
    head = model.lm_head.weight.detach().clone()
    taken = there[known].to(head.device)
    # a frozen head is the verifier's rows, at most rounded to bfloat16: nothing was learnt there
    if torch.equal(taken.bfloat16(), head[row[known]].bfloat16()):
        return None, 0
    head[row[known]] = taken
    return head, int(known.sum())
