"""What each serving engine reads in a draft's folder, as data and as a table.

Read in vLLM 0.32 (`llama_eagle3.py`, `speculators/algos.py`, `gpu_model_runner.py`) and in SGLang's `llama_eagle3.py` of
2025 and of July 2026, with its pull requests 24663 (fc_norm, norm_output), 25454 (layer ids), 32334 (norm_before_fc).
"""

from __future__ import annotations

from dataclasses import dataclass

from helpers import formats
from helpers.formats import EAGLE, IDS, SPECULATORS

NEWER = {"norm_before_fc": "#32334", "fc_norm": "#24663", "norm_output": "#24663"}  # SGLang's pull requests of May and July 2026


@dataclass(frozen=True)
class Contract:
    """What one engine reads. Fields are dotted paths into config.json."""

    format: str
    architectures: tuple[str, ...]  # () where the config's own type decides
    first_layer: tuple[str, ...]
    fields: tuple[str, ...]
    optional: tuple[str, ...]  # tensors it takes from the verifier or does not read
    layer_ids: str
    ids_field: str
    unexpressed: tuple[str, ...]  # norm flags it has no counterpart for
    most_layers: int | None = None
    sliding: bool = True


_FLAT = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act rms_norm_eps "
    "vocab_size draft_vocab_size max_position_embeddings rope_theta tie_word_embeddings"
).split()
_NESTED = [f"transformer_layer_config.{n}" for n in _FLAT if n not in ("draft_vocab_size", "rope_theta", "tie_word_embeddings")]
_SPECULATIVE = "speculators_config.proposal_methods.0.speculative_tokens"

CONTRACTS = {
    "vllm-speculators": Contract(
        format=SPECULATORS,
        architectures=(),
        first_layer=("layers.0.", "midlayer."),
        # vLLM takes norm_before_residual as True where it is missing, the library as False
        fields=(
            "speculators_model_type",
            "draft_vocab_size",
            IDS,
            "norm_before_residual",
            _SPECULATIVE,
            "speculators_config.verifier.name_or_path",
            "transformer_layer_config.rope_parameters",
            *_NESTED,
        ),  # fmt: skip
        optional=("embed_tokens.weight", "t2d"),
        layer_ids="as they are, at the top level, rising, three of them",
        ids_field=IDS,
        unexpressed=(),
    ),
    "vllm-eagle": Contract(
        format=EAGLE,
        architectures=formats.EAGLE_ARCHITECTURES,
        first_layer=("midlayer.", "layers.0."),
        fields=(*_FLAT, IDS),
        optional=("embed_tokens.weight", "t2d"),
        layer_ids="as they are, at the top level, rising",
        ids_field=IDS,
        unexpressed=(),
    ),
    "sglang": Contract(
        format=EAGLE,
        architectures=formats.EAGLE_ARCHITECTURES[:1],
        first_layer=("midlayer.",),
        fields=(*_FLAT, f"eagle_config.{IDS}"),
        optional=("embed_tokens.weight", "t2d"),
        layer_ids="one lower, under eagle_config, the first of them 1",
        ids_field=f"eagle_config.{IDS}",
        unexpressed=("norm_before_residual",),
        most_layers=1,
        sliding=False,
    ),
}


def names(form: str | None = None) -> list[str]:
    """Names of the engines' readings, all or those of one format."""
    return [name for name, c in CONTRACTS.items() if form in (None, c.format)]


def table() -> list[dict[str, str]]:
    """The contracts side by side, one row a subject: for `pages.table`."""
    rows: dict[str, dict[str, str]] = {}

    def put(subject: str, engine: str, text: str) -> None:
        rows.setdefault(subject, {"of the folder": subject})[engine] = text

    for engine, c in CONTRACTS.items():
        put("format", engine, c.format)
        put("architectures", engine, " or ".join(c.architectures) or "speculators_model_type eagle3")
        put("config fields", engine, ", ".join(c.fields))
        put("first layer", engine, " or ".join(f"{p}*" for p in c.first_layer))
        put("required tensors", engine, "fc, the layers, norm, lm_head; d2t where the vocabularies differ; norms that are switched on")
        put("optional tensors", engine, ", ".join(c.optional))
        put("forbidden tensors", engine, "any other" + (" (vLLM refuses them)" if "vllm" in engine else " (SGLang skips them)"))
        put("dtypes", engine, "floats bfloat16 or float16 as config.json says, d2t int64, t2d bool")
        put("d2t", engine, "offsets: draft id + d2t[draft id], within the vocabulary, no id twice")
        put("layer ids", engine, c.layer_ids)
        put("RoPE and positions", engine, "the verifier's base and scaling, at least its max_position_embeddings")
        put("norm flags", engine, "all" if not c.unexpressed else f"not {', '.join(c.unexpressed)}")
        put("layers", engine, "any number" if c.most_layers is None else f"{c.most_layers}, full attention")
    return list(rows.values())
