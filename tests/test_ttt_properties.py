"""Properties of the step over random documents, masks, lengths and shapes, held against plain float64 implementations."""

import copy

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from test_ttt import reference as plain_attention

from helpers import reference, ttt

STEPS = st.integers(1, 4)


@st.composite
def packed_rows(draw):
    """(document lengths, masks, padding): one token and nothing supervised are as likely as any other."""
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, 14)), min_size=1, max_size=4))
    masks = [draw(st.one_of(st.just([0] * n), st.just([1] * n), st.lists(st.integers(0, 1), min_size=n, max_size=n))) for n in lengths]
    return lengths, masks, draw(st.integers(0, 3))


def few(n):
    # without shrinking: a failure would then take minutes to be told
    return settings(max_examples=n, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


def pairs(documents, mask, steps):
    """Per step, every (start, target) that counts, by the definition: both in one document, the target supervised."""
    n = len(documents)
    return [[(i, i + k) for i in range(n - k) if documents[i] == documents[i + k] >= 0 and mask[i + k]] for k in range(steps)]


@few(200)
@given(packed_rows(), STEPS)
def test_a_plan_holds_exactly_the_positions_that_count(row, steps):
    lengths, masks, pad = row
    documents = [d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * pad
    mask = [m for part in masks for m in part] + [1] * pad  # padding never counts, whatever its mask says
    found = ttt.plan(torch.tensor(documents), torch.tensor(mask), steps)
    wanted = pairs(documents, mask, steps)
    starts = found.starts.tolist()
    assert starts == sorted({i for step in wanted for i, _ in step})
    assert [[starts[r] for r in rows.tolist()] for rows in found.targets] == [[i for i, _ in step] for step in wanted]
    covered = [(s.row + i, s.start + i) for s in found.segments for i in range(s.stop - s.start)]
    assert covered == list(enumerate(starts))  # each start in one segment, at its own row
    for s in found.segments:
        assert len(set(documents[s.document : s.stop])) == 1 and (s.document == 0 or documents[s.document - 1] != documents[s.document])
    assert [(s.start, s.stop) for s in found.documents] == [(sum(lengths[:d]), sum(lengths[: d + 1])) for d in range(len(lengths))]


@pytest.mark.parametrize(
    "case",
    [{}, {"window": 4, "draft_layers": 2}, {"draft_layer_type": "qwen3", "norm_output": True, "norm_before_fc": True}],
    ids=["llama", "window and two layers", "qwen3"],
)
def test_losses_and_every_gradient_are_the_float64_references(make_draft, make_batch, case):
    model = make_draft(**case)
    fast = ttt.bind(copy.deepcopy(model))

    @few(25)
    @given(packed_rows(), STEPS, st.integers(0, 2**16))
    @example(([1], [[1]], 0), 4, 0)  # a document of one token is all there is
    @example(([1, 9, 1], [[1], [0] * 4 + [1] * 5, [0]], 2), 3, 0)
    @example(([7, 5], [[0] * 7, [0] * 5], 1), 2, 0)  # nothing supervised
    def holds(row, steps, seed):
        lengths, masks, pad = row
        batch = make_batch(lengths, masks, pad=pad, seed=seed)
        wanted = reference.run(model, batch, steps)
        fast.zero_grad()
        _, loss, metrics = fast(**batch, ttt_steps=steps)
        loss.backward()
        # the library divides by the count plus 1e-5, which is visible in a row of few tokens
        counts = [len(p) for p in pairs(batch["document_ids"][0].tolist(), batch["loss_mask"][0].tolist(), steps)]
        scale = [n / (n + 1e-5) for n in counts]
        expected = sum(x.item() * s for x, s in zip(wanted.losses, scale, strict=True))
        assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        if any(counts):
            assert [metrics[f"full_acc_{j}_total"].item() for j in range(steps)] == counts
        for name, gradient in wanted.gradients.items():
            found = dict(fast.named_parameters())[name].grad.double()
            assert (found - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name

    holds()


@few(60)
@given(
    documents=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    width=st.sampled_from([4, 8, 20]),
    diagonals=st.integers(0, 3),
    window=st.one_of(st.none(), st.integers(1, 10)),
    cut=st.integers(0, 8),
    seed=st.integers(0, 2**16),
)
def test_attention_and_its_gradients_are_the_plain_ones_for_any_shape(documents, heads, width, diagonals, window, cut, seed):
    torch.manual_seed(seed)
    queries, groups = heads
    begins = [sum(documents[:d]) for d in range(len(documents))]
    # of each document the last part asks, as after a prompt: at least one position
    spans = [(b, b + min(cut, n - 1), b + n) for b, n in zip(begins, documents, strict=True)]
    segments, row = [], 0
    for begin, start, stop in spans:
        segments.append(ttt.Segment(begin, start, stop, row))
        row += stop - start
    total, starts = sum(documents), torch.cat([torch.arange(s, e) for _, s, e in spans])
    q = torch.randn(total, queries, width, dtype=torch.float64)
    tensors = [q] + [torch.randn(total, groups, width, dtype=torch.float64) for _ in range(2 + 2 * diagonals)]
    tensors = [x.requires_grad_() for x in tensors]
    q, k, v, *own = tensors
    wanted = torch.cat(
        [
            plain_attention(*(x[b:e] for x in (q, k, v)), [x[b:e] for x in own[::2]], [x[b:e] for x in own[1::2]], 0, 0.4, window)[s - b :]
            for b, s, e in spans
        ]
    )
    weight = torch.randn_like(wanted)
    gradients = torch.autograd.grad((wanted * weight).sum(), tensors)
    small = [x.detach().float().requires_grad_() for x in tensors]
    out = ttt.attend(small[0][starts], small[1], small[2], segments, 0.4, window, [x[starts] for x in small[3:]])
    found = torch.autograd.grad((out * weight.float()).sum(), small)
    assert torch.allclose(out.double(), wanted, atol=3e-6)
    for a, b in zip(found, gradients, strict=True):
        assert torch.allclose(a.double(), b, atol=3e-5), (a.double() - b).abs().max()
