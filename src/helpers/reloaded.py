"""What saving and loading may have changed in a draft: the attention it computes with, and the norms its flags promise.

Flags and attention are read from files that the weights do not depend on, so a wrong one loads without a word. Each is
therefore computed: attention against plain float64, a flag against its opposite.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from helpers import comparison, decoding, draft, speculative, ttt, weights
from helpers.attention_checks import TOLERANCE, relative_error
from helpers.errors import MissingInput, WorkbookError
from helpers.evidence import FIRST, Evidence, Finding

FLAG_ROWS = 12  # training rows on which a flag is held against its opposite


@contextlib.contextmanager
def _set(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes (object, name, value) set for a while."""
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    for thing, name, value in changes:
        setattr(thing, name, value)
    try:
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)


def attention_parity(e: Evidence) -> Finding:
    """The attention chosen for training gives this draft the outputs and gradients of a plain float64 computation."""
    from speculators.losses import resolve_loss_config

    choice, do = e.read(3, "attention.json")["attention"], "choose another attention in notebook 03 and train again"
    model, row, steps, wanted = e.probed
    arguments = {"ttt_steps": steps, "loss_config": resolve_loss_config("kl_div", "eager")}
    seen: list[torch.Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model.train().zero_grad()
    try:
        with torch.enable_grad(), _set((model.config.transformer_layer_config, "_attn_implementation", draft.library_attention(choice))):
            (ttt.forward(model, **row, **arguments) if choice == "ttt" else model(**row, **arguments))[1].backward()
    except Exception as error:  # whatever an implementation raises is its verdict
        return Finding(False, f"{choice} does not train here: {type(error).__name__}: {str(error)[:120]}", do)
    finally:
        hook.remove()
        model.eval()
    documents, mask = row["document_ids"][0], row["loss_mask"][0]
    places = ttt.plan(documents, mask, steps).starts if choice == "ttt" else (documents >= 0).nonzero().squeeze(1)
    output = max(relative_error(x if x.dim() == 2 else x[0][places], w[places]) for x, w in zip(seen, wanted.hidden, strict=True))
    own = {n: p.grad for n, p in model.named_parameters()}
    errors = {n: float("inf") if own[n] is None else relative_error(own[n], g) for n, g in wanted.gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    figure = f"{choice}: outputs {output:.0e}, gradients {errors[worst]:.0e} ({worst}) from float64 over {steps} TTT steps"
    return Finding(output <= TOLERANCE and errors[worst] <= TOLERANCE, figure, do)


@torch.no_grad()
def _decoded(e: Evidence) -> float:
    """Error of the decoding path (30 entries at once, the others one by one over the cache) against float64."""
    model, row, _, wanted = e.probed
    with _set((model.config.transformer_layer_config, "_attn_implementation", decoding.GROUPED)):  # as the drafter does
        drafter = speculative.Drafter(model)
        cache, tokens = decoding.RowCache(FIRST), row["input_ids"][:, :FIRST]
        features = drafter.features(row["hidden_states"][:, :FIRST])
        edges = [0, *range(30, FIRST + 1)]
        made = [drafter.advance(cache, tokens[:, a:b], features[:, a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    expected = wanted.hidden[0][:FIRST]
    return relative_error(torch.cat(made, 1)[0], model.norm(expected.float()) if model.config.norm_output else expected)


def attention_after_reload(e: Evidence) -> Finding:
    """The draft as loaded computes with the attention it was made for, and decodes as plain float64 does."""
    choice = e.read(3, "attention.json")["attention"]
    do = "load it with draft.load, which applies draft.json: the library's own from_pretrained falls back to flex attention"
    side = e.checkpoint / draft.SIDE_FILE
    if not side.is_file():
        return Finding(False, f"no {draft.SIDE_FILE} beside the weights, so the choice is lost", do)
    stored = json.loads(side.read_text(encoding="utf-8"))["attention"]
    if stored != choice:
        return Finding(False, f"{draft.SIDE_FILE} says {stored}, notebook 03 chose {choice}", "run notebook 04 again")
    used = {str(layer.self_attn.config._attn_implementation) for layer in e.model.layers}
    if not used <= {draft.library_attention(choice), decoding.GROUPED}:
        return Finding(False, f"the loaded draft computes with {', '.join(sorted(used))}; chosen was {choice}", do)
    error = _decoded(e)
    figure = f"{choice} stored, {', '.join(sorted(used))} in use; decoding over the cache is {error:.0e} from float64"
    return Finding(error <= TOLERANCE, figure, "report it: the decoding attention is wrong on this device")


def norm_flags(e: Evidence) -> Finding:
    """Norms that flags switch on have weights, weights that exist are switched on, and no flag does better the other way round."""
    config, first, faults = e.model.config, e.model.layers[0], []
    names = weights.headers(e.checkpoint)
    for flag, weight in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if bool(getattr(config, flag)) != (weight in names):
            faults.append(f"{flag} is {getattr(config, flag)}, {weight} is {'there' if weight in names else 'not there'}")
    now = {"norm_before_residual": bool(first.norm_before_residual), "norm_output": bool(config.norm_output)}
    try:
        asked = e.read(3, "draft_config.json")
        faults += [f"{flag} is {now[flag]}, trained with {asked[flag]}" for flag in now if flag in asked and asked[flag] != now[flag]]
    except MissingInput:
        pass
    told = []
    try:
        places, as_is = e.places("training")[:FLAG_ROWS], e.chains("training")
        for flag, holder in (("norm_before_residual", first), ("norm_output", config)):
            with _set((holder, flag, not now[flag])):
                both = comparison.compare(e.walked(places), as_is, seed=e.parameters.seed)
            told.append(f"{flag} {now[flag]}: {both['old']:.2f}, {not now[flag]}: {both['new']:.2f}")
            if both["verdict"] == "better":
                faults.append(f"{flag} {not now[flag]} is accepted more: {both['sentence']}")
    except WorkbookError:  # rows that cannot be read are the affair of another line
        told = told or ["not tried the other way round: no stored row can be read"]
    do = "set norm_before_residual, norm_before_fc, fc_norm and norm_output in config.json as the draft was trained"
    return Finding(not faults, "; ".join(faults or told), do)
