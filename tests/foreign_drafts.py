"""Drafts on disk as this project and others write them, for the tests of import and export."""

import json

import torch
from safetensors.torch import load_file, save_file

from helpers import draft, exports, formats


def saved(make_draft, folder, **changes):
    """A bfloat16 draft in `folder` with scattered vocabulary maps and a head of its own: identities would hide a slip."""
    model = make_draft(**changes)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.copy_(0.2 * torch.randn(model.lm_head.weight.shape, generator=draw))
        if model.d2t is not None:
            ids = torch.randperm(model.verifier_vocab_size, generator=draw)[: model.draft_vocab_size].sort().values
            model.d2t.copy_(ids - torch.arange(len(ids)))
            model.t2d.zero_()
            model.t2d[ids] = True
    draft.save(model.to(torch.bfloat16), folder, attention="sdpa")
    return folder


def logits(folder, verifier):
    """What the library's own forward makes of the draft in a folder that `draft.load` reads."""
    return exports.first_logits(draft.load(folder, verifier))


def edit_config(folder, change):
    """Apply a function to config.json, in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    """Apply a function to the dict of tensors, in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def specforge(source, folder, *, pickled=False, prefix="midlayer."):
    """The same draft as SpecForge saves it: no embeddings, layer ids one lower, transformers 4's spelling of RoPE."""
    raw, tensors = formats.read_config(source), load_file(source / "model.safetensors")
    layer = raw["transformer_layer_config"]
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps")
    config = {name: layer[name] for name in (*kept, "vocab_size", "max_position_embeddings")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
    config |= {"draft_vocab_size": raw["draft_vocab_size"], "tie_word_embeddings": False, "rope_scaling": None}
    config["rope_theta"] = layer["rope_parameters"]["rope_theta"]
    config["eagle_config"] = {formats.IDS: [i - 1 for i in raw[formats.IDS]]}
    config |= {name: raw[name] for name in formats.FLAGS if raw[name]}
    tensors = {n.replace("layers.0.", prefix): x for n, x in tensors.items() if n != "embed_tokens.weight"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder
