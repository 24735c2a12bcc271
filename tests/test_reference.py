"""The plain float64 reference against the library's own model: two independent ways to one number."""

import pytest
import torch
from speculators.losses import resolve_loss_config

from helpers import reference

CASES = [
    {},
    {"draft_layer_type": "qwen3", "norm_output": True},
    {"norm_before_residual": False, "norm_before_fc": True},
    {"fc_norm": True},
    {"draft_layers": 2, "window": 7},
]


def library(model, batch, steps):
    """(states per step, loss, gradients) of the library's forward in float32."""
    states = []
    handle = model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].detach()[0]))
    loss = model(**batch, ttt_steps=steps, loss_config=resolve_loss_config("kl_div", "eager"))[1]
    loss.backward()
    handle.remove()
    return states, loss.item(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def off(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "default")
def test_states_losses_and_gradients_are_the_librarys(make_draft, make_batch, case):
    model = make_draft(**case)
    # the masks start late enough that no start's target lies in the next document
    batch = make_batch([20, 31], [[0] * 9 + [1] * 11, [0] * 12 + [1] * 19], pad=5)
    states, loss, gradients = library(model, batch, 3)
    plain = reference.run(model, batch, 3)
    rows = batch["document_ids"][0] >= 0
    assert max(off(a[rows], b[rows]) for a, b in zip(states, plain.hidden, strict=True)) < 1e-6
    assert loss == pytest.approx(sum(plain.losses).item(), rel=1e-5)
    assert set(gradients) == set(plain.gradients)
    assert max(off(gradients[name], g) for name, g in plain.gradients.items()) < 1e-5


def test_a_start_without_a_target_in_its_document_counts_nothing(make_draft, make_batch):
    model = make_draft()
    batch = make_batch([12, 12], [[0] * 6 + [1] * 6, [1] * 12])
    whole = reference.run(model, batch, 2)
    parts = [{k: v[:, a : a + 12] for k, v in batch.items()} for a in (0, 12)]
    # targets of step 1: positions 6..11 of the first document all have a start in it, position 0 of the second has none
    counts = [(6, 6), (12, 11)]
    for j in range(2):
        sums = [reference.run(model, part, 2).losses[j] * n[j] for part, n in zip(parts, counts, strict=True)]
        assert torch.allclose(whole.losses[j], sum(sums) / sum(n[j] for n in counts))
