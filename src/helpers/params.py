"""Every notebook parameter in one strict schema: type, range, unit, default, meaning.

The defaults are the default run's (`papermill_params/smollm2.yaml`). A YAML file holds every name; a notebook's
parameters cell holds the ones its stage uses. `recompute`, folders and the device change no result, so they are left
out of the fingerprints that decide freshness.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from helpers.errors import ParameterError

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("01_extraction", "02_vocab_mapping", "03_draft_config_and_attention", "04_training", "05_acceptance_evaluation")


def _p(default: Any, stages: str, meaning: str, *, fingerprint: bool = True, **limits: Any) -> Any:
    """Declare a parameter; `stages` are the first digits of the notebooks that use it ("1", "45")."""
    return Field(default, description=meaning, json_schema_extra={"stages": stages, "fingerprint": fingerprint}, **limits)


Count = Annotated[int, Field(strict=True)]


class Parameters(BaseModel):
    """All parameters of a run. Unknown names, wrong types and values out of range are refused, all at once."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run: str = _p("smollm2", "12345", "name of the run: its folder under runs_folder", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", fingerprint=False)
    runs_folder: str = _p("data/runs", "12345", "where runs are kept; relative paths start at the repository", min_length=1, fingerprint=False)
    verifier: str = _p("smollm2-135m-instruct", "12345", "the verifier: smollm2-135m-instruct or tiny (both come with the workbook), a folder, or a hub id", min_length=1)
    verifier_dtype: Literal["bfloat16", "float16", "float32"] = _p("bfloat16", "1345", "dtype the verifier runs in and its states are stored in")
    device: str = _p("auto", "1345", "auto, cpu, cuda or cuda:N", pattern=r"^(auto|cpu|cuda(:\d+)?)$", fingerprint=False)
    seed: Count = _p(0, "12345", "seed of every random draw", ge=0)
    recompute: bool = _p(False, "12345", "compute again what is fresh on disk", fingerprint=False)
    example_id: str = _p("train-a-001", "12345", "id of the conversation followed through the five notebooks", min_length=1)

    prompts_train: str = _p("data/prompts/train.jsonl", "15", "prompts to answer and train on (JSONL)", min_length=1)
    prompts_limit: Count = _p(900, "1", "first so many prompts after shuffling; 0 takes all", ge=0)
    max_sequence_tokens: Count = _p(1024, "1345", "longest conversation, in tokens; a longer prompt is an error", ge=16, le=1_048_576)
    answer_max_tokens: Count = _p(128, "1", "longest answer, in tokens", ge=1)
    answer_temperature: float = _p(0.0, "1", "0 answers greedily, above it samples", ge=0.0, le=5.0)
    answer_batch_rows: Count = _p(192, "1", "conversations answered at once", ge=1)
    extraction_batch_tokens: Count = _p(4096, "1", "tokens in one forward pass of the extraction", ge=16)
    aux_layer_ids: list[Count] = _p([], "1", "three decoder layers whose output the draft reads; empty takes 2, n/2, n-3")
    heldout_share: float = _p(0.08, "1234", "share of conversations kept out of training", gt=0.0, lt=0.9)
    audit_rows: Count = _p(6, "1", "rows whose stored states are held against a fresh forward pass", ge=1)

    draft_vocab_size: Count = _p(4096, "23", "tokens the draft can propose", ge=1)

    draft_layers: Count = _p(1, "3", "decoder layers of the draft", ge=1, le=8)
    draft_layer_type: Literal["llama", "qwen3"] = _p("llama", "3", "architecture of the draft's layers")
    draft_intermediate_size: Count = _p(0, "3", "width of the draft's MLP; 0 takes the verifier's", ge=0)
    draft_heads: Count = _p(0, "3", "attention heads of the draft; 0 takes the verifier's", ge=0)
    draft_kv_heads: Count = _p(0, "3", "key-value heads of the draft; 0 takes the verifier's", ge=0)
    draft_window: Count = _p(0, "3", "sliding window of the draft's attention, in tokens; 0 sees everything", ge=0)
    norm_before_residual: bool = _p(True, "3", "residual starts from the normalised state")
    norm_before_fc: bool = _p(False, "3", "one norm over the joined states before the projection")
    fc_norm: bool = _p(False, "3", "one norm per joined state before the projection (EAGLE-3.1)")
    norm_output: bool = _p(False, "3", "feed the normalised state back between steps (EAGLE-3.1)")
    attention: str = _p("auto", "3", "attention implementation; auto takes the fastest that passes every trial", min_length=1)
    attention_trial_tokens: list[Count] = _p([256, 1024, 2048], "3", "sequence lengths each implementation is timed at", min_length=1)

    draft_init: str = _p("random", "4", "where the draft starts: random, verifier (its last layers), or the folder of a draft", min_length=1)
    train_head: bool = _p(False, "34", "train the draft's head (the paper does); false keeps the verifier's rows")
    train_optimizer: Literal["adamw", "muon"] = _p("muon", "4", "optimiser of the matrices (muon leaves norms to adamw)")
    train_learning_rate: float = _p(1.0e-3, "4", "AdamW learning rate", gt=0.0, le=1.0)
    train_muon_learning_rate: float = _p(4.0e-3, "4", "Muon learning rate", gt=0.0, le=1.0)
    train_weight_decay: float = _p(0.01, "4", "weight decay of AdamW", ge=0.0, le=1.0)
    train_muon_weight_decay: float = _p(0.01, "4", "weight decay of Muon", ge=0.0, le=1.0)
    train_betas: list[float] = _p([0.9, 0.999], "4", "AdamW's two averaging factors", min_length=2, max_length=2)
    train_clip: float = _p(1.0, "4", "largest gradient norm (the library itself cuts at 1)", gt=0.0, le=1.0)
    train_scheduler: Literal["linear", "cosine", "none"] = _p("cosine", "4", "how the rate falls")
    train_warmup_ratio: float = _p(0.02, "4", "share of steps the rate rises over", ge=0.0, le=1.0)
    train_epochs: Count = _p(3, "4", "passes over the training conversations", ge=1)
    train_batch_tokens: Count = _p(1536, "34", "tokens packed into one step", ge=16)
    train_ttt_steps: Count = _p(3, "34", "training-time-test steps", ge=1, le=8)
    train_step_decay: float = _p(1.0, "34", "weight of step j is this to the power j", gt=0.0, le=1.0)
    train_loss: Literal["kl_div", "ce", "tv", "nla", "lk_hybrid", "js_div", "rkl_div"] = _p("kl_div", "34", "loss against the verifier's distribution")
    train_on_prompts: bool = _p(True, "4", "take the loss at prompt positions too, not at the answers' alone")
    noise_std: float = _p(0.0, "4", "standard deviation of Gaussian noise on training hidden states", ge=0.0, le=10.0)

    prompts_evaluation: str = _p("data/prompts/evaluation.jsonl", "15", "prompts the draft is measured on (JSONL with category)", min_length=1)
    evaluation_draft: str = _p("", "5", "another draft to measure: folder of a speculators or EAGLE checkpoint; empty takes this run's")
    evaluation_prompts: Count = _p(64, "5", "first so many evaluation prompts; 0 takes all", ge=0)
    evaluation_max_tokens: Count = _p(96, "5", "longest answer in the evaluation, in tokens", ge=2)
    evaluation_batch_rows: Count = _p(32, "5", "conversations decoded at once", ge=1)
    speculative_tokens: Count = _p(3, "2345", "drafted tokens per verification step, K", ge=1, le=16)
    evaluation_k_values: list[Count] = _p([1, 2, 3, 4, 5, 6, 7, 8], "5", "values of K in the sweep", min_length=1)
    sweep_prompts: Count = _p(64, "5", "evaluation prompts whose chains are replayed for other K and another draft", ge=1)
    lossless_prompts: Count = _p(24, "5", "prompts decoded in float32 to prove the output unchanged", ge=1)
    lossless_tokens: Count = _p(24, "5", "tokens each of them is decoded for", ge=2)
    sampling_draws: Count = _p(200, "5", "sampled answers per prompt, to prove their distribution unchanged", ge=20)
    sampling_temperature: float = _p(1.0, "5", "temperature they are sampled at", gt=0.0, le=5.0)
    speed_prompts: Count = _p(5, "5", "prompts timed one at a time", ge=1)
    speed_tokens: Count = _p(32, "5", "tokens each of them is decoded for", ge=4)
    evaluation_in_vllm: bool = _p(True, "5", "decode the prompts in vLLM as well, where an environment with it is found")
    node_decode_ms: float = _p(20.0, "5", "one decoding step on the node you serve from, in milliseconds", gt=0.0)
    node_allreduce_share: float = _p(0.5, "5", "share of that step spent in all-reduce", ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _fits_together(self) -> Parameters:
        problems = []
        if self.aux_layer_ids and sorted(set(self.aux_layer_ids)) != self.aux_layer_ids:
            problems.append(f"aux_layer_ids {self.aux_layer_ids}: must rise without repeats (vLLM sorts them)")
        if self.answer_max_tokens >= self.max_sequence_tokens:
            problems.append(
                f"answer_max_tokens {self.answer_max_tokens} leaves no room for a prompt in max_sequence_tokens {self.max_sequence_tokens}"
            )
        if self.train_batch_tokens < self.max_sequence_tokens:
            problems.append(
                f"train_batch_tokens {self.train_batch_tokens} is below max_sequence_tokens {self.max_sequence_tokens}: "
                "the trainer would cut longer conversations without a word"
            )
        if self.norm_before_fc and self.fc_norm:
            problems.append("norm_before_fc and fc_norm: one norm over the joined states or one for each, not both")
        if any(not 0.0 <= b < 1.0 for b in self.train_betas):
            problems.append(f"train_betas {self.train_betas}: each must lie in 0..1, below 1")
        if any(k < 1 or k > 16 for k in self.evaluation_k_values):
            problems.append(f"evaluation_k_values {self.evaluation_k_values}: each must lie in 1..16")
        if self.speculative_tokens not in self.evaluation_k_values:
            problems.append(f"speculative_tokens {self.speculative_tokens} must be one of evaluation_k_values {self.evaluation_k_values}")
        if any(n < 16 for n in self.attention_trial_tokens):
            problems.append(f"attention_trial_tokens {self.attention_trial_tokens}: each must be at least 16")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def names(stage: str) -> list[str]:
    """Parameters that a stage's notebook declares, in schema order."""
    digit = str(STAGES.index(stage) + 1)
    return [n for n, f in Parameters.model_fields.items() if digit in f.json_schema_extra["stages"]]


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "together"
        found = item.get("input")
        hint = ""
        if isinstance(found, str) and item["type"].startswith(("float", "int")):
            hint = " (YAML reads 3e-4 as text: write 3.0e-4)" if "e" in found.lower() else " (it is text: remove the quotes)"
        shown = "" if name == "together" else f", found {found!r}"
        lines.append(f"{name}: {item['msg']}{shown}{hint}")
    return lines


def _unknown(found: list[str]) -> list[str]:
    lines = []
    for name in found:
        near = difflib.get_close_matches(name, Parameters.model_fields, n=1)
        lines.append(f"{name}: unknown parameter" + (f", did you mean {near[0]}?" if near else ""))
    return lines


def check(values: dict[str, Any], *, where: str, complete: bool) -> Parameters:
    """Validate `values`; with `complete`, every parameter has to be there.

    Raises:
        ParameterError: lists all problems at once.
    """
    known = {n: v for n, v in values.items() if n in Parameters.model_fields}
    problems = _unknown([n for n in values if n not in Parameters.model_fields])
    if complete:
        problems += [f"{n}: missing" for n in Parameters.model_fields if n not in values]
    try:
        result = Parameters(**known)
    except ValidationError as error:
        problems += _explain(error)
        result = None
    if problems or result is None:
        raise ParameterError(
            f"{len(problems)} problem(s) with the parameters:\n" + "\n".join(f"  - {p}" for p in problems),
            where=where,
            do="correct these lines; `workbook params` lists every parameter with its type, range, default and meaning",
        )
    return result


def load(path: str | Path) -> Parameters:
    """Read a parameter file (flat YAML holding every parameter).

    Raises:
        ParameterError: the file is missing, is not flat YAML, or has any wrong entry.
    """
    path = Path(path)
    if not path.is_file():
        shipped = sorted(p.name for p in (ROOT / "papermill_params").glob("*.yaml"))
        raise ParameterError(f"no parameter file {path}", where=str(path), do=f"pass one of papermill_params/{{{', '.join(shipped)}}} or your own copy")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError(f"not readable as YAML: {error}", where=str(path), do="write one `name: value` per line") from error
    if not isinstance(values, dict) or not all(isinstance(k, str) for k in values):
        raise ParameterError("not a flat list of `name: value` lines", where=str(path), do="write one `name: value` per line")
    return check(values, where=str(path), complete=True)


def from_cell(namespace: dict[str, Any]) -> Parameters:
    """The parameters of a running notebook, from the globals its parameters cell (and papermill's) made.

    Names the cell does not declare take the schema's defaults, which are the default run's. Call it right after that
    cell: any other plain value in the namespace is then a misspelt parameter, and is refused.

    Raises:
        ParameterError: lists all problems at once.
    """
    plain = (bool, int, float, str, list, dict, type(None))
    ignored = {"In", "Out", "exit", "quit"}
    values = {n: v for n, v in namespace.items() if isinstance(v, plain) and not n.startswith("_") and n not in ignored}
    return check(values, where="the parameters cell of this notebook", complete=False)


def fingerprint(parameters: Parameters, stage: str) -> str:
    """Sixteen hex digits over the values that change what `stage` computes."""
    fields = Parameters.model_fields
    values = {n: getattr(parameters, n) for n in names(stage) if fields[n].json_schema_extra["fingerprint"]}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def resolve(path: str | Path) -> Path:
    """A path as given if absolute, otherwise below the repository: the caller's working directory never matters."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else ROOT / path
