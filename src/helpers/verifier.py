"""Finding and loading the verifier, and seeing inside it: layer ids, weight names, capture of hidden states.

Layer ids follow speculators and vLLM: id k is the residual stream after k decoder layers (0 = embeddings); id n is the
output of the last layer *before* the final norm. transformers' `hidden_states[n]` is after that norm, which is why the
last one is taken by a hook here.

Shapes: B rows, T tokens, A captured layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from helpers import decoding, embedded
from helpers.errors import VerifierError
from helpers.params import resolve

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def first_line(error: BaseException) -> str:
    """The first line of an error's text; libraries write pages."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def ensure(name: str) -> Path:
    """Folder of a verifier's checkpoint, fetched or made first if it is one that comes with the workbook.

    Args:
        name: `smollm2-135m-instruct`, `tiny`, a local folder, or a hub id.

    Raises:
        VerifierError: the folder is no checkpoint, or the hub cannot be reached or does not know the id.
    """
    if name in embedded.NAMES:
        return embedded.ensure(name)
    folder = resolve(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise VerifierError(
                "the folder holds no config.json, so it is no checkpoint",
                where=str(folder),
                do="point `verifier` at the folder with config.json and *.safetensors",
            )
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise VerifierError(
            f"unknown verifier {name!r}: neither one of the workbook's own ({', '.join(embedded.NAMES)}), nor a folder, nor a hub id",
            where="parameter verifier",
            do="use one of these names, the path of a checkpoint folder, or an id of the form owner/name",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]))
    except Exception as error:  # hub errors have no common base across its versions
        raise VerifierError(
            f"hub id {name!r} could not be downloaded: {type(error).__name__}: {first_line(error)}",
            where="parameter verifier",
            do="check the id and the network, or download it elsewhere and give the folder",
        ) from error


def text_config(config: Any) -> Any:
    """The language model's config: nested ones (`text_config`) are unwrapped."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def default_layer_ids(layers: int) -> list[int]:
    """Three layers the draft reads: 2, n/2, n-3, as speculators and vLLM choose them.

    Raises:
        VerifierError: the verifier is too shallow for three distinct, rising ids.
    """
    ids = [2, layers // 2, layers - 3]
    if sorted(set(ids)) != ids:
        raise VerifierError(
            f"the usual layers {ids} do not rise for a verifier of {layers} layers",
            where="parameter aux_layer_ids",
            do=f"name three distinct layers between 0 and {layers}, for example [0, 1, {layers}]",
        )
    return ids


def layer_ids(config: Any, chosen: list[int]) -> list[int]:
    """The ids to capture: the chosen ones checked against the verifier's depth, or the default.

    Raises:
        VerifierError: an id lies outside 0..n, or there are not three.
    """
    layers = text_config(config).num_hidden_layers
    if not chosen:
        return default_layer_ids(layers)
    if len(chosen) != 3 or min(chosen) < 0 or max(chosen) > layers:
        raise VerifierError(
            f"aux_layer_ids {chosen} must be three ids between 0 and {layers}",
            where="parameter aux_layer_ids",
            do="0 is the embeddings, n the output of the last layer",
        )
    return chosen


def load_tokenizer(folder: Path):
    """The verifier's tokenizer.

    Raises:
        VerifierError: it has no chat template, without which no conversation can be rendered.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise VerifierError(
            "the verifier's tokenizer has no chat template, so its conversations cannot be rendered as it will be served",
            where=str(folder),
            do="use the instruct version of the model, or put the template it is served with into chat_template.jinja",
        )
    return tokenizer


@dataclass
class Verifier:
    """A loaded verifier and the parts the workbook touches."""

    folder: Path
    model: Any
    tokenizer: Any
    config: Any  # the language model's config
    decoder: Any  # module with .layers and .norm; its forward makes no logits
    head: Any  # module from normalised state [.., H] to logits [.., V]
    device: torch.device
    dtype: torch.dtype

    @property
    def depth(self) -> int:
        return len(self.decoder.layers)

    @property
    def end_ids(self) -> set[int]:
        """Token ids that end an answer."""
        found: set[int] = set()
        for value in (self.model.generation_config.eos_token_id, self.config.eos_token_id, self.tokenizer.eos_token_id):
            if isinstance(value, int):
                found.add(value)
            elif value:
                found.update(value)
        return found

    def logits(self, last_BTH: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] from the state before the final norm [B, T, H]."""
        return self.head(self.decoder.norm(last_BTH.to(self.dtype)))

    def in_dtype(self, dtype: torch.dtype) -> Verifier:
        """A copy of this verifier computing in another dtype."""
        model = copy.deepcopy(self.model).to(dtype)
        return replace(self, model=model, decoder=_find_decoder(model), head=model.get_output_embeddings(), dtype=dtype)

    @contextlib.contextmanager
    def capture(self, ids: list[int]) -> Iterator[dict[int, torch.Tensor]]:
        """While open, each forward leaves the states of layers `ids` (0..n) in the yielded dict, [B, T, H] each."""
        states: dict[int, torch.Tensor] = {}
        handles = []

        def keep(k: int):
            def after(_module, _args, output):
                states[k] = output[0] if isinstance(output, tuple) else output

            return after

        def before(k: int):
            def hook(_module, args, kwargs):
                states[k] = args[0] if args else kwargs["hidden_states"]

            return hook

        for k in sorted(set(ids)):
            if k == 0:
                handles.append(self.decoder.layers[0].register_forward_pre_hook(before(0), with_kwargs=True))
            elif k == self.depth:
                handles.append(self.decoder.norm.register_forward_pre_hook(before(k), with_kwargs=True))
            else:
                handles.append(self.decoder.layers[k - 1].register_forward_hook(keep(k)))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def padded(self, rows: Sequence[Sequence[int]], *, extra: int = 0) -> torch.Tensor:
        """Rows of token ids side by side [B, T] on this device, zeros to their right: `extra` of them behind the longest."""
        ids = torch.zeros(len(rows), max(1, *map(len, rows)) + extra, dtype=torch.long, device=self.device)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = torch.tensor(row, device=self.device)
        return ids

    @torch.inference_mode()
    def next_logits(self, context: Sequence[int]) -> torch.Tensor:
        """Logits of the token after a context [V], from one plain forward pass."""
        ids = torch.tensor([list(context)], device=self.device)
        return self.head(self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -1])

    @torch.inference_mode()
    def states(self, input_ids_BT: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """States of layers `ids` and of the last layer for right-padded rows, [B, T, A + 1, H].

        Causal attention keeps padding after a row from reaching it, so no mask is needed; nothing is computed above
        the last layer (no head, no `output_hidden_states`).
        """
        with self.capture([*ids, self.depth]) as found:
            self.decoder(input_ids=input_ids_BT.to(self.device), use_cache=False)
        return torch.stack([found[k] for k in [*ids, self.depth]], dim=2)


def _find_decoder(model: Any) -> Any:
    """The module that holds `.layers` and `.norm`, wherever the architecture nests it."""
    for _, module in model.named_modules():
        if (
            hasattr(module, "layers")
            and hasattr(module, "norm")
            and isinstance(module.layers, torch.nn.ModuleList)
            and hasattr(module, "embed_tokens")
        ):
            return module
    raise VerifierError(
        f"{type(model).__name__} has no module with .embed_tokens, .layers and .norm, so its layers cannot be read",
        where="verifier",
        do="use a decoder-only architecture of transformers",
    )


def load(name: str, *, device: str | torch.device = "cpu", dtype: str = "bfloat16", attention: str | None = None) -> Verifier:
    """Load a verifier for inference.

    Args:
        name: as for `ensure`.
        attention: transformers' attention implementation; None takes `decoding.GROUPED`, made for decoding.

    Raises:
        VerifierError: it cannot be found, has no chat template or an unknown layout.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    folder = ensure(name)
    tokenizer = load_tokenizer(folder)
    options = {"dtype": DTYPES[dtype], "attn_implementation": attention or decoding.GROUPED}
    config = None
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except ValueError as error:
        if not hasattr(config, "text_config"):
            raise VerifierError(
                f"transformers cannot load it as a causal language model: {first_line(error)}",
                where=str(folder),
                do="check `model_type` in config.json",
            ) from error
        model = AutoModelForImageTextToText.from_pretrained(folder, **options)
    except OSError as error:
        raise VerifierError(
            f"its weights cannot be read: {first_line(error)}", where=str(folder), do="download the checkpoint again"
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    return Verifier(
        folder,
        model,
        tokenizer,
        text_config(config),
        _find_decoder(model),
        model.get_output_embeddings(),
        torch.device(device),
        DTYPES[dtype],
    )


def portable(folder: Path) -> str:
    """A folder as it is written into configs and pages: relative to the working tree where it lies inside it."""
    from helpers.params import ROOT

    return os.path.relpath(folder, ROOT) if folder.is_relative_to(ROOT) else str(folder)
