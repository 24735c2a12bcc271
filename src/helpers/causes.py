"""Known causes of low acceptance in data, states, positions and vocabulary, each held against what is on disk and loaded.

What a file merely says of itself is not believed where it can be computed: masks are decoded, states are made again, norms and
rotary angles are compared with the verifier's, counts are counted again.

Shapes: T tokens, H hidden size, V vocabulary, D draft vocabulary, K drafted tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from helpers import audit, coverage, forced, vocab
from helpers.conversations import answer_text, prompt_ids
from helpers.errors import DataError
from helpers.evidence import Evidence, Finding, spread
from helpers.extraction import spoken

MASK_ROWS = 24  # rows whose mask is decoded
NORM_CAUSES = (audit.AFTER_NORM, audit.HEAD)
NORM_DIFFERENCE = 0.02  # relative; one norm in two dtypes differs by 0.004
TURN = 0.01  # radians that two rotary tables may be apart at the run's longest distance
LEAST_COVERED = 0.8  # of answer tokens; below, even a perfect draft of K = 3 emits less than 1 + 0.8 + 0.64 + 0.51 = 2.95
SAME_HEAD = 0.9  # cosine from which a row of the draft's head is said to be one of the verifier's


def _mask_fault(e: Evidence, i: int) -> str | None:
    """What is wrong with a row's ids and mask, told from its conversation rendered and tokenised again; None if nothing."""
    (ids, mask), talk, tokenizer = e.rows[i], e.talks[i], e.verifier.tokenizer
    span, messages = forced.answer_span(mask), talk["messages"]
    if span is None:
        return "nothing is supervised"
    asked = prompt_ids(tokenizer, messages[:-1], row=talk["id"])
    if ids[: len(asked)] != asked:  # functions offered to the model are in the prompt file alone
        asked = prompt_ids(tokenizer, messages[:-1], e.tools.get(talk["id"]), row=talk["id"])
    if ids[: len(asked)] != asked:
        return "the template renders other tokens than those stored"
    if span[0] != len(asked):
        return f"the mask begins {abs(span[0] - len(asked))} token(s) {'late' if span[0] > len(asked) else 'early'}"
    said, wanted = answer_text(tokenizer, ids[slice(*span)]), messages[-1]["content"]
    cut = len(ids) >= e.parameters.max_sequence_tokens and wanted.startswith(said.rstrip("\ufffd"))
    if said != wanted and not cut:
        return "what is supervised does not read as the answer"
    if talk["ended"] and ids[span[1] - 1] not in e.verifier.end_ids and not cut:
        return "the end-of-turn token is not supervised"
    return None


def template_and_mask(e: Evidence) -> Finding:
    """The answers' tokens, all of them and nothing else, are supervised, behind the prompt as the template renders it now."""
    if len(e.talks) != len(e.rows):
        what = f"{len(e.rows)} rows of tokens, {len(e.talks)} conversations"
        return Finding(False, what, "run notebook 01 again: the two were made together")
    chosen = spread(len(e.rows), MASK_ROWS)
    faults = [_mask_fault(e, i) for i in chosen]
    found = Counter(f for f in faults if f)
    told = "; ".join(f"{n} of {len(chosen)} rows: {fault}" for fault, n in found.most_common())
    good = f"{len(chosen)} of {len(chosen)} rows decode to their answer, end of turn included"
    return Finding(
        not found, told or good, "run notebook 01 again with the chat template the verifier is served with; look at its section 6"
    )


def layer_ids(e: Evidence) -> Finding:
    """Each stored slice is the layer it claims, and the draft reads the same layers in the same order."""
    claimed, reads = list(e.results(1)["layer_ids"]), list(e.model.config.eagle_aux_hidden_state_layer_ids)
    if reads != claimed:
        do = "put the stored ids into the draft's config (eagle_aux_hidden_state_layer_ids), or train on states of these layers"
        return Finding(False, f"the draft reads {reads}, it was trained on {claimed}", do)
    causes = Counter(c for r in e.audited for c in (r["cause"] or "").split("; ") if c and c not in NORM_CAUSES)
    far = [(r["distance"], r["next_layer"]) for r in e.audited if r["distance"] is not None]
    apart = f"layers {claimed}, {len(e.audited)} rows: {max(d for d, _ in far):.4f} from their own" if far else "no row could be compared"
    if far:
        apart += f", {min(n for _, n in far):.2f} from the next"
    told = "; ".join(f"{n} of {len(e.audited)} rows: {cause}" for cause, n in causes.items())
    do = "; ".join(audit.CAUSES[c] for c in causes) or "see the audit in notebook 01"
    return Finding(not causes and bool(far), told or apart, do)


@torch.no_grad()
def final_norm(e: Evidence) -> Finding:
    """The last stored state stands before the final norm, and the draft's targets go through the verifier's own norm and head."""
    causes = [c for r in e.audited for c in (r["cause"] or "").split("; ") if c in NORM_CAUSES]
    if causes:
        return Finding(False, f"{len(causes)} of {len(e.audited)} rows: {causes[0]}", audit.CAUSES[causes[0]])
    ids = torch.tensor([list(e.rows[0][0])[:256]], device=e.verifier.device)
    last = e.verifier.states(ids, [])[0, :, -1]
    own = e.verifier.decoder.norm(last)
    draft_dtype = e.model.verifier_norm.weight.dtype
    apart = audit.relative(e.model.verifier_norm(last.to(e.model.fc.weight.device, draft_dtype)).to(own.device), own).max().item()
    eps = float(e.model.config.transformer_layer_config.rms_norm_eps), float(e.verifier.config.rms_norm_eps)
    rebuilt = min((r["top1"] for r in e.audited if r["top1"] is not None), default=float("nan"))
    figure = f"the norm behind the targets is {apart:.1e} from the verifier's; rebuilt logits agree at {rebuilt:.1%}; eps {eps[0]:g}"
    if apart > NORM_DIFFERENCE:
        do = "load the verifier's final norm into the draft (a missing one is replaced by ones; Gemma's is 1 + w) and train again"
        return Finding(False, figure, do)
    if abs(eps[0] - eps[1]) > 1e-3 * eps[1]:
        return Finding(False, f"rms_norm_eps {eps[0]:g}, the verifier has {eps[1]:g}", "take the verifier's rms_norm_eps and train again")
    return Finding(True, figure)


def rope(e: Evidence) -> Finding:
    """The draft turns positions by the verifier's angles and goes as far as the verifier does."""
    mine, theirs = e.model.config.transformer_layer_config, e.verifier.config
    reach, faults = e.parameters.max_sequence_tokens, []
    rotary = getattr(e.verifier.decoder, "rotary_emb", None)
    ours, own = e.model.rotary_emb.inv_freq.float().cpu(), getattr(rotary, "inv_freq", None)
    bases = [(dict(getattr(c, "rope_parameters", None) or {})).get("rope_theta") for c in (mine, theirs)]
    turn = None
    if own is not None and own.shape == ours.shape:
        turn = ((ours - own.float().cpu()).abs().max() * reach).item()
        if turn > TURN:
            faults.append(
                f"angles {turn:.2g} rad apart at a distance of {reach:,} tokens (base {_plain(bases[0])}, verifier {_plain(bases[1])})"
            )
    elif bases[0] != bases[1]:
        faults.append(f"base {_plain(bases[0])}, the verifier has {_plain(bases[1])}")
    if mine.max_position_embeddings < theirs.max_position_embeddings:
        faults.append(f"{mine.max_position_embeddings:,} positions, the verifier has {theirs.max_position_embeddings:,}")
    figure = f"base {_plain(bases[0])}, {mine.max_position_embeddings:,} positions, as the verifier"
    figure += "" if turn is None else f"; angles {turn:.1g} rad apart at {reach:,} tokens"
    do = "take rope_parameters and max_position_embeddings from the verifier's config, keep inv_freq in float32, and train again"
    return Finding(not faults, "; ".join(faults) or figure, do)


def _plain(value: Any) -> str:
    return "unknown" if value is None else f"{float(value):,.0f}"


# --- vocabulary ----------------------------------------------------------------------------------------------------


def vocabulary(e: Evidence) -> Finding:
    """The draft can say the tokens that answers are made of, and the one that ends them."""
    k = e.parameters.speculative_tokens
    heldout = [np.asarray(run, dtype=np.int64) for row in e.rows[e.training :] for run in spoken(*row)]
    answers = [np.asarray(r["tokens"], dtype=np.int64) for r in e.records]
    size = e.model.draft_vocab_size
    inside = np.ones(e.verifier.config.vocab_size, bool) if e.model.t2d is None else e.model.t2d.cpu().numpy()
    shares, parts = [], []
    for name, texts in (("held-out", heldout), ("evaluation", answers)):
        tokens = np.concatenate([np.zeros(0, np.int64), *texts])
        if len(tokens):
            shares.append(float(inside[tokens].mean()))
            emits = [emit for emit in coverage.emitted(texts, inside, k) if len(emit)]
            ceiling = sum(map(len, emits)) / max(1, sum(map(coverage.chain_steps, emits)))
            parts.append(f"{shares[-1]:.1%} of {name} answer tokens (accept length at most {ceiling:.2f})")
    if not shares:
        return Finding(None, "no answer to count")
    misses = Counter(m for r in e.records for m in r["miss"] if m)
    figure = f"{size:,} tokens cover " + ", ".join(parts)
    figure += f"; {misses['outside']:,} of {misses.total():,} refused guesses could not be said" if misses else ""
    lacking = [i for i in sorted(e.verifier.end_ids) if not inside[i]]
    if lacking:
        return Finding(False, f"end-of-turn tokens {lacking} are outside; {figure}", "keep them (notebook 02 does) and train again")
    return Finding(min(shares) >= LEAST_COVERED, figure, "raise draft_vocab_size (notebook 02 shows what each size costs) and train again")


@torch.no_grad()
def _strange_heads(e: Evidence, ids: np.ndarray, *, among: int = 256) -> tuple[int, int]:
    """(rows of the draft's head that are another token's row of the verifier's, rows that are one of them at all), of a sample."""
    chosen = spread(len(ids), among)
    weight = e.verifier.head.weight
    rows = normalize(e.model.lm_head.weight[chosen].float().to(weight.device), dim=-1)
    blocks = [(rows @ normalize(block.float(), dim=-1).T).max(-1).values for block in weight.split(16_384)]
    top = torch.stack(blocks).max(0).values
    own = (rows * normalize(weight[torch.tensor(ids[chosen], device=weight.device)].float(), dim=-1)).sum(-1)
    known = top > SAME_HEAD
    return int((known & (own < top - 0.01)).sum()), int(known.sum())  # two tokens may have equal rows


def mapping(e: Evidence) -> Finding:
    """`d2t` and `t2d` are in range, unique and agree with each other, with the head's rows, and with the counts they come from."""
    do = "give the draft the map of notebook 02 that it was trained with; if that is lost, run 02 and 04 again"
    if e.model.d2t is None:
        return Finding(True, f"the draft has all {e.model.draft_vocab_size:,} tokens")
    d2t, t2d = e.model.d2t.cpu().numpy(), e.model.t2d.cpu().numpy()
    try:
        vocab.check(d2t, t2d)
    except DataError as error:
        return Finding(False, error.what, do)
    ids = d2t + np.arange(len(d2t))
    strange, known = _strange_heads(e, ids)
    if known and strange > 0.02 * known:
        return Finding(False, f"{strange} of {known} head rows are other tokens' rows of the verifier's head", do)
    facts = e.read(2, vocab.MAP)
    stored = [np.load(e.file(2, f"{name}-{facts['draft_vocab_size']}.npy")) for name in ("d2t", "t2d")]
    if stored[0].shape != d2t.shape or (stored[0] != d2t).any() or (stored[1] != t2d).any():
        unlike = "another size" if stored[0].shape != d2t.shape else f"{int((stored[1] != t2d).sum() // 2):,} tokens differ"
        return Finding(False, f"the draft's map is not the one of notebook 02: {unlike}", do)
    counts = vocab.load_counts(e.file(2, vocab.COUNTS), len(t2d))
    now = vocab.token_counts(e.rows[: e.training], len(t2d))
    if (counts != now).any():
        what = f"stored counts hold {int(counts.sum()):,} tokens, the rows {int(now.sum()):,}; {int((counts != now).sum()):,} ids differ"
        return Finding(False, what, "run notebook 02 again: it was made from other rows or masks")
    wanted = vocab.build(counts, len(d2t), len(t2d), always_keep=facts.get("kept", []))
    if (wanted.ids != ids).any():
        return Finding(False, f"{len(np.setdiff1d(ids, wanted.ids)):,} tokens are not those the counts choose", do)
    return Finding(
        True, f"{len(d2t):,} ids rise within {len(t2d):,}, t2d marks the same, {known} of {known} head rows looked at are theirs"
    )
