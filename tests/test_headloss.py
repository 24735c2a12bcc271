"""The loss by blocks and the pieces between matrix products: against plain formulas, where blocks and slices end anywhere."""

import pytest
import torch
from speculators.losses import resolve_loss_config
from test_ttt import assert_equal, both

from helpers import headloss, pointwise, ttt


@pytest.mark.parametrize("width", [128, 100])
def test_the_first_of_equal_maxima_is_found(width):
    torch.manual_seed(0)
    x = torch.randint(0, 5, (50, width)).float()  # many ties
    value, index = headloss.top(x)
    wanted = [(row.tolist().index(max(row.tolist())), row.max().item()) for row in x]
    assert list(zip(index.tolist(), value.tolist(), strict=True)) == wanted


def test_a_distribution_with_certain_tokens_has_a_finite_entropy():
    logits = torch.tensor([[0.0, 200.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    p = torch.empty(2, 4)
    negative, best = headloss._distribution(logits, p)
    assert torch.allclose(p, logits.softmax(-1)) and best.tolist() == [1, 3]
    assert torch.allclose(negative, torch.tensor([0.0, (p[1] * p[1].log()).sum()]), atol=1e-6)


@pytest.mark.parametrize("loss", ["kl_div", "tv"])
@pytest.mark.parametrize("rows, part", [(8, 3), (7, 7), (1, 1)])
def test_where_blocks_end_changes_nothing(make_draft, make_batch, monkeypatch, loss, rows, part):
    monkeypatch.setattr(headloss, "ROWS", rows)
    monkeypatch.setattr(headloss, "SLICE", part)
    model = make_draft()
    model.lm_head.weight.requires_grad_(True)
    # answers with gaps: the starts of a block are then no run of its targets
    batch = make_batch([40], [[0] * 8 + [1] * 5 + [0, 1, 0, 0, 1, 1, 0] + [1] * 20])
    theirs, ours = both(model, batch, ttt_steps=3, ttt_step_loss_decay=0.8, loss_config=resolve_loss_config(loss, "eager"))
    assert_equal(theirs, ours, 3e-5)
    for k in range(3):
        assert ours[1][f"full_acc_{k}_sum"].item() == theirs[1][f"full_acc_{k}_sum"].item()


def test_without_gradients_the_loss_is_the_same(make_draft, make_batch):
    batch = make_batch([40], [[0] * 8 + [1] * 32])
    model = make_draft()
    fast = ttt.bind(model)
    wanted = fast(**batch, ttt_steps=2)[1].item()
    with torch.no_grad():
        assert fast(**batch, ttt_steps=2)[1].item() == wanted


# --- pieces ------------------------------------------------------------------------------------------------------


def close(compute, plain, *tensors):
    """Outputs and gradients of two ways are the same, in float32 against float64."""
    found, wanted = ([x.detach().to(kind).requires_grad_() for x in tensors] for kind in (torch.float32, torch.float64))
    a, b = compute(*found), plain(*wanted)
    weight = torch.randn_like(b)
    assert torch.allclose(a.double(), b, atol=1e-5)
    gradients = torch.autograd.grad((a * weight.float()).sum(), found), torch.autograd.grad((b * weight).sum(), wanted)
    for x, y in zip(*gradients, strict=True):
        assert torch.allclose(x.double(), y, atol=1e-4), (x.double() - y).abs().max()


def plain_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def test_norm_rotation_and_gated_mlp_have_the_plain_gradients():
    torch.manual_seed(0)
    weight, cos, sin = torch.rand(12), torch.randn(9, 12), torch.randn(9, 12)  # unequal halves too

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]

    def mlp(x, both, down):
        gate, up = (x @ both.T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ down.T

    close(lambda x, w: pointwise._Norm.apply(x, w, 1e-5, torch.float32), plain_norm, torch.randn(9, 12), weight)
    close(lambda x, w: pointwise._Norm.apply(x, w, 1e-5, torch.float32), plain_norm, torch.randn(9, 3, 12), weight)
    close(lambda x: pointwise.rotate(x, cos, sin), turned, torch.randn(9, 3, 12))
    close(pointwise.gated_mlp, mlp, torch.randn(9, 12), torch.randn(16, 12), torch.randn(12, 8))


@pytest.mark.parametrize("rows", [None, torch.tensor([1, 4, 5])])
def test_the_joined_input_has_the_plain_gradients(rows):
    torch.manual_seed(0)
    table, token = torch.randn(20, 6), torch.randint(0, 20, (9,))

    def compute(hidden, first, second):
        joined, normed = pointwise._Join.apply(token, table, hidden, first, second, 1e-5, torch.float32, rows)
        return torch.cat([joined.flatten(), normed.flatten()])

    def plain(hidden, first, second):
        normed = plain_norm(hidden, second)
        joined = torch.cat([plain_norm(table[token].double(), first), normed], -1)
        return torch.cat([joined.flatten(), (normed if rows is None else normed[rows]).flatten()])

    close(compute, plain, torch.randn(9, 6), torch.rand(6), torch.rand(6))


def test_a_hooked_norm_is_called_as_it_is(make_draft):
    norm, seen = make_draft().norm, []
    x = torch.randn(3, 64)
    wanted = pointwise.rms_norm(norm, x, torch.float32)
    norm.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(pointwise.rms_norm(norm, x, torch.float32), wanted, atol=1e-6) and seen == [1]
