"""The fast step against the library's own model, and its attention against a plain reference."""

import copy

import pytest
import torch
from speculators.losses import resolve_loss_config

from helpers import flash, ttt


def run(model, batch, **kwargs):
    model.zero_grad()
    _, loss, metrics = model(**batch, **kwargs)
    loss.backward()
    return loss.detach(), metrics, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def both(model, batch, **kwargs):
    fast = ttt.bind(copy.deepcopy(model))
    return run(model, batch, **kwargs), run(fast, batch, **kwargs)


def assert_equal(theirs, ours, tolerance=1e-5):
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=tolerance)
    assert set(ours[2]) == set(theirs[2])
    for name, grad in theirs[2].items():
        error = (ours[2][name] - grad).norm() / grad.norm().clamp_min(1e-12)
        assert error < tolerance, (name, error.item())


CASES = [
    {},
    {"draft_layer_type": "qwen3"},
    {"norm_before_residual": False},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"draft_layers": 2},
    {"draft_layers": 2, "draft_layer_type": "qwen3", "norm_output": True},
    {"window": 7},
    {"window": 7, "draft_layers": 2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()) or "default")
@pytest.mark.parametrize("steps", [1, 3])
def test_losses_accuracies_and_every_gradient_equal_the_librarys(make_draft, make_batch, case, steps):
    # masks start late enough in each document that no start's target lies in the next one
    batch = make_batch([20, 31], [[0] * 9 + [1] * 11, [0] * 12 + [1] * 19], pad=5)
    theirs, ours = both(make_draft(**case), batch, ttt_steps=steps, loss_config=resolve_loss_config("kl_div", "eager"))
    assert_equal(theirs, ours)
    for k in range(steps):
        for name in (f"loss_{k}", f"full_acc_{k}"):
            assert ours[1][f"{name}_sum"].item() == pytest.approx(theirs[1][f"{name}_sum"].item(), rel=1e-5)
            assert ours[1][f"{name}_total"].item() == theirs[1][f"{name}_total"].item()


def test_seven_steps_with_decay_equal_the_librarys(make_draft, make_batch):
    batch = make_batch([60], [[0] * 25 + [1] * 35])
    theirs, ours = both(make_draft(), batch, ttt_steps=7, ttt_step_loss_decay=0.8, loss_config=resolve_loss_config("kl_div", "eager"))
    assert_equal(theirs, ours)
    assert ours[1]["cond_acc_6_total"].item() == theirs[1]["cond_acc_6_total"].item()


@pytest.mark.parametrize("loss", ["ce", "tv", "nla", "lk_hybrid", "rkl", "jsd"])
def test_every_loss_of_the_library_has_its_gradient(make_draft, make_batch, loss):
    batch = make_batch([24], [[0] * 8 + [1] * 16])
    theirs, ours = both(make_draft(), batch, ttt_steps=2, loss_config=resolve_loss_config(loss, "eager"))
    assert_equal(theirs, ours, 3e-5)


def test_several_answers_in_one_conversation_equal_the_librarys(make_draft, make_batch):
    batch = make_batch([40], [[0] * 8 + [1] * 9 + [0] * 11 + [1] * 12])
    theirs, ours = both(make_draft(), batch, ttt_steps=3, loss_config=resolve_loss_config("kl_div", "eager"))
    assert_equal(theirs, ours)


def test_a_trained_head_gets_the_librarys_gradient(make_draft, make_batch):
    model = make_draft()
    model.lm_head.weight.requires_grad_(True)
    batch = make_batch([30], [[0] * 10 + [1] * 20])
    theirs, ours = both(model, batch, ttt_steps=3, loss_config=resolve_loss_config("kl_div", "eager"))
    assert "lm_head.weight" in ours[2]
    assert_equal(theirs, ours)


def test_starts_never_reach_a_target_in_the_next_document(make_draft, make_batch):
    # the second document is supervised from its first token: the library then trains the first one's last starts on it
    batch = make_batch([16, 16], [[0] * 8 + [1] * 8, [1] * 16])
    model = make_draft()
    loss = resolve_loss_config("kl_div", "eager")
    theirs, ours = both(model, batch, ttt_steps=3, loss_config=loss)
    apart = [make_batch([16], [[1] * 16]) for _ in range(2)]
    for i, one in enumerate(apart):
        for key in one:
            one[key] = batch[key][:, 16 * i : 16 * (i + 1)]
    counts = [
        int((b["loss_mask"][0, k:] & (b["document_ids"][0, k:] == b["document_ids"][0, : 16 - k])).sum()) for b in apart for k in range(3)
    ]
    fast = ttt.bind(copy.deepcopy(model))
    expected = 0.0
    for k in range(3):
        sums = [run(fast, b, ttt_steps=3, loss_config=loss)[1][f"loss_{k}_sum"].item() * counts[3 * i + k] for i, b in enumerate(apart)]
        expected += sum(sums) / (counts[k] + counts[3 + k])
    assert ours[0].item() == pytest.approx(expected, rel=1e-5)
    assert theirs[0].item() != pytest.approx(expected, rel=1e-4)


def test_a_batch_without_supervised_tokens_gives_a_zero_that_counts_for_nothing(make_draft, make_batch):
    batch = make_batch([12], [[0] * 12])
    loss, metrics, grads = run(ttt.bind(make_draft()), batch, ttt_steps=3)
    assert loss.item() == 0.0 and metrics["loss_total"].item() == 0.0
    assert all(g.abs().max() == 0 for g in grads.values())


def test_a_one_token_document_is_survived(make_draft, make_batch):
    batch = make_batch([1, 20, 1], [[1], [0] * 6 + [1] * 14, [0]])
    loss, metrics, grads = run(ttt.bind(make_draft()), batch, ttt_steps=3)
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in grads.values())
    assert metrics["full_acc_0_total"].item() == 15  # the one-token document's only position and the fourteen


def test_a_later_token_a_neighbour_or_padding_moves_nothing_before_it(make_draft, make_batch):
    batch = make_batch([18, 14], [[0] * 6 + [1] * 12, [0] * 4 + [1] * 10], pad=4)
    model = ttt.bind(make_draft())

    def hidden(b):
        found = []
        handle = model.norm.register_forward_hook(lambda _m, args, _o: found.append(args[0].detach()))
        model(**b, ttt_steps=3)
        handle.remove()
        return found

    starts = ttt.plan(batch["document_ids"][0], batch["loss_mask"][0], 3).starts
    before = hidden(batch)
    changed = {k: v.clone() for k, v in batch.items()}
    changed["hidden_states"][0, 12] += 1.0  # inside the first document
    for a, b in zip(before, hidden(changed), strict=True):
        moved = (a - b).abs().amax(-1) > 0
        assert not moved[(starts < 12) | (starts >= 18)].any()
        assert moved[(starts >= 12) & (starts < 18)].all()


def test_evaluation_counts_against_the_full_vocabulary(make_draft, make_batch):
    model = make_draft(draft_vocab_size=32)
    head = torch.randn(512, 64)
    ids = model.t2d.nonzero().squeeze(1)
    with torch.no_grad():
        model.verifier_lm_head.weight.copy_(head[ids])
    batch = make_batch([40], [[0] * 8 + [1] * 32])
    model = ttt.bind(model, head).eval()
    top = torch.nn.functional.linear(model.verifier_norm(batch["verifier_last_hidden_states"]), head).argmax(-1)[0, 8:]
    inside = model.t2d[top].float().mean().item()
    with torch.no_grad():
        drafted, _, metrics = model(**batch, ttt_steps=1)
    right = (ids[drafted[0][0, 8:]] == top).sum().item()
    assert metrics["full_acc_0_sum"].item() == right
    assert inside < 0.5  # most targets lie outside, which accuracy within the draft vocabulary would hide


def reference(q, k, v, ks, vs, document, scale, window=None):
    """Plain float64 TTT attention, one query at a time."""
    groups = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // groups
            first = max(document, i - window + 1) if window else document
            keys = torch.cat([k[first : i + 1, g], *[x[i : i + 1, g] for x in ks]])
            values = torch.cat([v[first : i + 1, g], *[x[i : i + 1, g] for x in vs]])
            out[i, h] = torch.softmax(keys @ q[i, h] * scale, 0) @ values
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dense", [False, True], ids=["fused", "dense"])
def test_attention_and_its_gradients_equal_a_plain_float64_reference(monkeypatch, window, dense):
    if dense:
        monkeypatch.setattr(flash, "fused", lambda *_: False)
    torch.manual_seed(0)
    n = 19
    q = torch.randn(n, 6, 8, dtype=torch.float64, requires_grad=True)
    rest = [torch.randn(n, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    weight = torch.randn(n, 6, 8, dtype=torch.float64)
    expected = reference(q, rest[0], rest[1], rest[2::2], rest[3::2], 0, 0.3, window)
    wanted = torch.autograd.grad((expected * weight).sum(), [q, *rest])
    segments = [ttt.Segment(0, 0, 11, 0), ttt.Segment(0, 11, n, 11)]
    small = [x.detach().float().requires_grad_() for x in (q, *rest)]
    out = ttt.attend(*small[:3], segments, 0.3, window, small[3:])
    got = torch.autograd.grad((out * weight.float()).sum(), small)
    assert torch.allclose(out.double(), expected, atol=2e-6)
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-5), (a.double() - b).abs().max()


def test_dropping_the_gradient_through_the_log_sum_exp_would_be_seen(monkeypatch):
    """The fault other trainers had: forward exact, query gradients wrong. The reference comparison has to notice it."""
    torch.manual_seed(0)
    q, k, v, k1, v1 = (torch.randn(12, h, 8, requires_grad=True) for h in (4, 2, 2, 2, 2))
    expected = torch.autograd.grad(reference(q, k, v, [k1], [v1], 0, 0.3).square().sum(), q)[0]
    kept = flash._backward0
    monkeypatch.setattr(flash, "_backward0", lambda d, q, k, v, o, lse, *a: kept(d, q, k, v, torch.zeros_like(o), lse, *a))
    got = torch.autograd.grad(ttt.attend(q, k, v, [ttt.Segment(0, 0, 12, 0)], 0.3, None, (k1, v1)).square().sum(), q)[0]
    assert (got - expected).norm() / expected.norm() > 0.1
