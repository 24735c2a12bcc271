"""A trained draft as a folder that vLLM or SGLang serves, checked against the engine's contract before it is left there.

speculators: the checkpoint as vLLM reads it, without the library's own code beside it, weights in bfloat16.
eagle: `midlayer.*` and `LlamaForCausalLMEagle3`, which SGLang and vLLM read. Both layer-id forms are written: ours at the
top level, where vLLM looks first, and one lower under `eagle_config`, where SGLang looks and adds 1.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from helpers import contract, draft, engines, files, formats, imports, verifier, weights
from helpers.errors import DataError
from helpers.formats import EAGLE, IDS, SPECULATORS, Anatomy

MARK = "export.json"  # tells a folder that may be replaced from one that is somebody's


@dataclass(frozen=True)
class Exported:
    """A folder that was written, with the rows of each engine's contract and the engines it serves."""

    folder: Path
    serves: list[str]
    checks: dict[str, list[contract.Row]]


def export(
    source: Path, to: str, out: Path, verifier_folder: Path | str, *, only: Sequence[str] = (), verifier_name: str | None = None
) -> Exported:
    """Write a draft for the engines that read a format, and reload it to see that it gives the same logits.

    Args:
        source: a draft's folder, `04_training/best` for one.
        to: `speculators` or `eagle`.
        out: folder to write; an earlier export there is replaced, anything else is left alone.
        only: engines it has to serve; without them it has to serve one of those that read the format.
        verifier_name: what the config tells vLLM to load as the verifier; the folder where it is None.

    Raises:
        DataError: an engine asked for, or none at all, can serve this draft (each reason is told); `out` is not an
            export; the reloaded draft differs. Nothing is written then.
        MissingInput, DamagedInput: the source cannot be read.
    """
    readers = engines.names(to)
    if not readers or not set(only) <= set(readers):
        known = f"format {to!r}, engines {', '.join(readers) or 'none'}"
        raise DataError(
            f"cannot export for {', '.join(only) or to}", where=known, do="--to speculators, or --to eagle [--engine vllm|sglang]"
        )
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).is_file())):
        what = "the folder holds something else than an earlier export" if out.is_dir() else "there is a file of this name"
        raise DataError(what, where=files.shown(out), do="give --out another folder; nothing was written")
    verifier_config = _language_config(verifier_folder)
    raw, where = formats.read_config(source), files.shown(source / "config.json")
    a = formats.anatomy(raw, where, verifier_config.num_hidden_layers)
    if a.layer_ids is None:
        a = replace(a, layer_ids=tuple(verifier.default_layer_ids(verifier_config.num_hidden_layers)))
    found = _bfloat16(weights.tensors(source))
    with files.atomic(out) as scratch:
        scratch.mkdir(parents=True)
        config = _config(raw, a, to, source, str(verifier_name or verifier_folder))
        _write(scratch, config, found if to == SPECULATORS else eagle_names(found))
        checks, serves = _judge(scratch, readers, verifier_config)
        if to == EAGLE and serves == ["vllm-eagle"] and "sglang" not in only:
            # SGLang would serve it wrong without a word; under vLLM's own name for the class it refuses it
            files.write_json(scratch / "config.json", config | {"architectures": [formats.EAGLE_ARCHITECTURES[1]]})
            checks, serves = _judge(scratch, readers, verifier_config)
        lacking = [name for name in only or readers if name not in serves]
        if only and lacking or not serves:
            lines = [f"  - {name}: {line}" for name in lacking for line in contract.failed(checks[name])]
            raise DataError("this draft cannot be exported so:\n" + "\n".join(lines), where=files.shown(source), do=_advice(to))
        _same_logits(source, scratch, verifier_folder)
        side = source / draft.SIDE_FILE
        if side.is_file():
            files.write_bytes(scratch / draft.SIDE_FILE, side.read_bytes())
        origin = {path.name: files.file_sha256(path) for path in weights.weight_files(source)}
        told = {"format": to, "serves": serves, "from": files.shown(source), "sha256": origin, "speculators": version("speculators")}
        files.write_json(scratch / MARK, told)
    return Exported(out, serves, checks)


def serve_command(engine: str, folder: Path, verifier_name: str, k: int) -> str:
    """The command line that serves a verifier with an exported draft and K drafted tokens."""
    draft_folder = str(folder.resolve())
    if engine == "sglang":
        model = f"--model-path {shlex.quote(verifier_name)} --speculative-algorithm EAGLE3"
        # SGLang counts the verified token in, so K drafted ones are K + 1 there
        steps = f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        return f"python -m sglang.launch_server {model} --speculative-draft-model-path {shlex.quote(draft_folder)} {steps}"
    options = json.dumps({"method": "eagle3", "model": draft_folder, "num_speculative_tokens": k})
    return f"vllm serve {shlex.quote(verifier_name)} --speculative-config {shlex.quote(options)}"


def eagle_names(found: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a draft under EAGLE's names: the first layer is `midlayer`."""
    return {name.replace("layers.0.", "midlayer.") if name.startswith("layers.0.") else name: x for name, x in found.items()}


def _language_config(verifier_folder: Path | str) -> Any:
    from transformers import AutoConfig

    return verifier.text_config(AutoConfig.from_pretrained(str(verifier_folder)))


def _bfloat16(found: dict[str, Any]) -> dict[str, Any]:
    """Tensors under speculators' names, floats in bfloat16, as both engines run the draft."""
    import torch

    cast = {formats.library_name(name): x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in found.items()}
    return {name: x.contiguous() for name, x in cast.items() if not name.startswith("verifier_")}


def _config(raw: dict[str, Any], a: Anatomy, to: str, source: Path, verifier_name: str) -> dict[str, Any]:
    """The config.json of the export."""
    if formats.kind(raw, files.shown(source)) != SPECULATORS:
        raise DataError("the source is an EAGLE draft already", where=files.shown(source), do="export a draft that notebook 04 trained")
    if to == SPECULATORS:
        # auto_map points at a copy of the library's code, which no engine needs and a careful one refuses to run
        config = {name: value for name, value in raw.items() if name != "auto_map"} | {"dtype": "bfloat16"}
        config["transformer_layer_config"] = raw["transformer_layer_config"] | {"dtype": "bfloat16"}
        target = raw["speculators_config"]["verifier"] | {"name_or_path": verifier_name}
        return config | {IDS: list(a.layer_ids), "speculators_config": raw["speculators_config"] | {"verifier": target}}
    layer = {
        name: value for name, value in raw["transformer_layer_config"].items() if name not in ("rope_parameters", "dtype", "layer_types")
    }
    rope = {name: value for name, value in a.rope.items() if name != "rope_theta"}
    if a.sliding_window:
        layer["layer_types"] = raw["transformer_layer_config"]["layer_types"]
    ids = list(a.layer_ids)
    eagle = {IDS: [i - 1 for i in ids], "use_aux_hidden_state": True, "norm_before_fc": a.flags["norm_before_fc"]}
    return layer | {
        "architectures": [formats.EAGLE_ARCHITECTURES[0]],
        "draft_vocab_size": a.draft_vocab,
        "tie_word_embeddings": False,
        # both spellings: transformers 5 reads the first, 4 and SGLang's older versions the other two
        "rope_parameters": a.rope,
        "rope_theta": a.rope["rope_theta"],
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        **a.flags,
        IDS: ids,
        "eagle_config": eagle,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write(folder: Path, config: dict[str, Any], found: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    files.write_json(folder / "config.json", config)
    with files.atomic(folder / "model.safetensors") as temporary:
        save_file(found, temporary, metadata={"format": "pt"})


def _judge(folder: Path, readers: list[str], verifier_config: Any) -> tuple[dict[str, list[contract.Row]], list[str]]:
    checks = {name: contract.check_contract(folder, name, verifier_config=verifier_config) for name in readers}
    return checks, [name for name, rows in checks.items() if not contract.failed(rows)]


def _advice(to: str) -> str:
    return "train a draft the engine can express" + (", or --to speculators for vLLM" if to == EAGLE else "; nothing was written")


def first_logits(model: Any, *, tokens: int = 48, steps: int = 2, seed: int = 0) -> Any:
    """Logits [steps, tokens, D] of the library's own forward on random states and tokens, each step fed by the one before."""
    import torch

    device, a = model.fc.weight.device, model.fc.in_features
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(1, tokens, a, generator=draw).to(device, model.fc.weight.dtype)
    ids = torch.randint(0, model.verifier_vocab_size, (1, tokens), generator=draw).to(device)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    try:
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            model(hidden_states=states, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=steps)
    finally:
        hook.remove()
    return torch.stack(seen)


def _same_logits(source: Path, folder: Path, verifier_folder: Path | str) -> None:
    """Reload both and compare. Raises DataError: the logits differ anywhere."""
    import torch

    before = imports.load(source, verifier_folder, attention="sdpa", dtype=torch.bfloat16).float()
    expected = first_logits(before)
    del before  # a large verifier's embeddings twice over need not fit
    found = first_logits(imports.load(folder, verifier_folder, attention="sdpa"))
    if not torch.equal(expected, found):
        gap = (expected - found).abs().max().item()
        raise DataError(
            f"the exported draft's logits differ by up to {gap:.3g}", where=files.shown(source), do="report this: nothing was written"
        )
