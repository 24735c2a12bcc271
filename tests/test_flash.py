"""Block 0's kernels: the guard on private operators, the fallback, and what the CUDA call is given, as far as a CPU can tell."""

import pytest
import torch

from helpers import flash
from helpers.flash import Segment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# a prompt of 4 before an answer of 3, one more answer in the same document, a document that is all answer,
# and one behind a prompt short enough that its queries are moved behind rows of zeros
SEGMENTS = [Segment(0, 4, 7, 0), Segment(0, 9, 11, 3), Segment(11, 11, 16, 5), Segment(16, 17, 20, 10)]
ROWS, POSITIONS = 13, 20


@pytest.fixture
def changed(monkeypatch):
    """Pretends that an operator's arguments are others than known."""

    def change(name, arguments):
        monkeypatch.setitem(flash.KNOWN, name, arguments)
        flash._changed.cache_clear()

    yield change
    flash._changed.cache_clear()


def tensors(dtype=torch.float32, device="cpu", heads=(4, 2), width=8):
    torch.manual_seed(0)
    return [torch.randn(n, h, width).to(device, dtype) for n, h in ((ROWS, heads[0]), (POSITIONS, heads[1]), (POSITIONS, heads[1]))]


def plain(q, k, v, segments, scale, window):
    """(out, lse) one query at a time in float64."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    groups = q.shape[1] // k.shape[1]
    for s in segments:
        for n, at in enumerate(range(s.start, s.stop)):
            first = s.document if window is None else max(s.document, at - window + 1)
            for h in range(q.shape[1]):
                scores = k[first : at + 1, h // groups].double() @ q[s.row + n, h].double() * scale
                lse[s.row + n, h] = scores.logsumexp(0)
                out[s.row + n, h] = scores.softmax(0) @ v[first : at + 1, h // groups].double()
    return out, lse


# --- the guard ---------------------------------------------------------------------------------------------------


def test_the_operators_are_as_they_are_known_in_the_pinned_torch():
    assert {name: flash._changed(name) for name in flash.KNOWN} == dict.fromkeys(flash.KNOWN, "")
    assert flash.missing(CPU, torch.bfloat16, 64) == "" and flash.fused(CPU, torch.float32)


@pytest.mark.parametrize("name", flash.PAIRS["cpu"])
def test_an_operator_that_changed_is_not_called_and_the_result_is_the_same(changed, monkeypatch, name):
    q, k, v = tensors()
    wanted = flash.forward(q, k, v, SEGMENTS, 0.3, None)[:2]
    gradients = flash.backward(q, q, k, v, *wanted, SEGMENTS, 0.3, None, None)
    changed(name, flash.KNOWN[name].replace("is_causal", "causal_mode"))
    assert f"changed aten::{name}" in flash.missing(CPU, torch.float32, 8) and torch.__version__ in flash.missing(CPU, torch.float32, 8)
    monkeypatch.setattr(torch.ops.aten, name, None)  # a call would raise
    for a, b in zip(wanted, flash.forward(q, k, v, SEGMENTS, 0.3, None)[:2], strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    for a, b in zip(gradients, flash.backward(q, q, k, v, *wanted, SEGMENTS, 0.3, None, None), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_an_operator_that_is_gone_is_told(changed):
    changed("_flash_attention_that_never_was", "query")
    assert "has no aten::_flash_attention_that_never_was" in flash._changed("_flash_attention_that_never_was")


@pytest.mark.parametrize(
    "device, dtype, width, words",
    [
        (CUDA, torch.float32, 64, "does not take float32"),
        (CUDA, torch.bfloat16, 100, "multiples of 8 up to 256, not 100"),
        (CPU, torch.float16, 64, "does not take float16"),
        (torch.device("meta"), torch.float32, 64, "no fused kernel for meta"),
    ],
)
def test_what_a_kernel_does_not_take_is_told_in_words(device, dtype, width, words):
    assert words in flash.missing(device, dtype, width) and not flash.fused(device, dtype, width)


def test_an_old_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in flash.missing(CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert flash.missing(CUDA, torch.bfloat16, 64) == ""


# --- what a CUDA call is given -----------------------------------------------------------------------------------


def test_cumulative_lengths_give_each_segment_its_documents_keys_up_to_its_last_query():
    found = flash.lengths(SEGMENTS, POSITIONS, CPU)
    assert found.queries.tolist() == [0, 3, 5, 10, 13] and found.queries.dtype == torch.int32
    assert found.keys.tolist() == [0, 7, 18, 23, 27] and found.keys.dtype == torch.int32
    assert (found.most_queries, found.most_keys, found.rows) == (5, 11, 13)
    assert found.index.tolist() == [*range(7), *range(11), *range(11, 20)]


def test_documents_that_are_packed_without_a_gap_need_no_copy_of_the_keys():
    assert flash.lengths([Segment(0, 2, 6, 0), Segment(6, 6, 9, 4)], 9, CPU).index is None
    assert flash.lengths([Segment(0, 2, 6, 0), Segment(6, 6, 9, 4)], 12, CPU).index is not None  # padding behind


def test_segments_out_of_order_are_refused():
    with pytest.raises(ValueError, match="does not follow"):
        flash.lengths([Segment(0, 0, 3, 1)], 3, CPU)


class Kernel:
    """The two CUDA operators by their documented contract, in float64: sequences between cumulative lengths, the causal mask aligned
    to the last key, a window to the left of the query's own position, log-sum-exp as [heads, queries]."""

    def forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left=None, window_size_right=None):
        self.contract(q, k, v, cum_q, cum_k, max_q, max_k)
        assert (dropout, causal, debug) == (0.0, True, False)
        assert window_size_right == (None if window_size_left is None else 0)
        out, lse = self.dense(q.double(), k.double(), v.double(), cum_q, cum_k, scale, window_size_left)
        return out.to(q.dtype), lse.float(), torch.tensor([7]), torch.tensor([8]), torch.empty(0)

    def backward(
        self, d, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        self.contract(q, k, v, cum_q, cum_k, max_q, max_k)
        assert out.shape == q.shape and lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous() and d.is_contiguous()
        assert (rng.item(), unused.item(), dropout, causal) == (7, 8, 0.0, True)
        q, k, v = (x.double().requires_grad_() for x in (q, k, v))
        groups, total = q.shape[1] // k.shape[1], 0.0
        for a, b, c, e in zip(cum_q[:-1], cum_q[1:], cum_k[:-1], cum_k[1:], strict=True):
            wide_k, wide_v = (x[c:e].repeat_interleave(groups, 1) for x in (k, v))
            scores = self.scores(q[a:b], wide_k, scale, window_size_left)
            p = (scores - lse[:, a:b, None]).exp()
            # the kernel's own gradient: D = rowsum(dO out) with the out it was given
            delta = (d[a:b] * out[a:b]).sum(-1).T.double()
            ds = (p * (torch.einsum("qhd,khd->hqk", d[a:b].double(), wide_v) - delta[..., None])).detach()
            total = total + (ds * scores.masked_fill(scores == float("-inf"), 0)).sum()
            total = total + torch.einsum("hqk,khd,qhd->", p.detach(), wide_v, d[a:b].double())
        return [g.float() for g in torch.autograd.grad(total, (q, k, v))]

    def contract(self, q, k, v, cum_q, cum_k, max_q, max_k):
        assert q.dim() == k.dim() == 3 and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        assert cum_q[-1] == q.shape[0] and cum_k[-1] == k.shape[0] == v.shape[0]
        assert max_q == cum_q.diff().max() and max_k == cum_k.diff().max()

    def scores(self, q, wide_k, scale, left):
        queries, keys = q.shape[0], wide_k.shape[0]
        at = torch.arange(queries)[:, None] + keys - queries
        hidden = torch.arange(keys) > at
        if left is not None:
            hidden = hidden | (torch.arange(keys) < at - left)
        return (torch.einsum("qhd,khd->hqk", q, wide_k) * scale).masked_fill(hidden, float("-inf"))

    def dense(self, q, k, v, cum_q, cum_k, scale, left):
        groups, out, lse = q.shape[1] // k.shape[1], torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
        for a, b, c, e in zip(cum_q[:-1], cum_q[1:], cum_k[:-1], cum_k[1:], strict=True):
            scores = self.scores(q[a:b], k[c:e].repeat_interleave(groups, 1), scale, left)
            out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[c:e].repeat_interleave(groups, 1))
            lse[:, a:b] = scores.logsumexp(-1)
        return out, lse


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padding", [0, 2])
def test_the_cuda_path_computes_the_same_through_a_kernel_that_keeps_the_contract(monkeypatch, window, padding):
    kernel = Kernel()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward)
    q, k, v = tensors()
    q = torch.cat([q, torch.zeros(padding, *q.shape[1:])])
    d = torch.randn(q.shape)
    out, lse, kept = flash._forward_cuda(q, k, v, SEGMENTS, 0.3, window)
    wanted, wanted_lse, _ = flash.forward(q, k, v, SEGMENTS, 0.3, window)
    assert torch.allclose(out, wanted, atol=1e-6) and torch.allclose(lse, wanted_lse, atol=1e-6)
    gradients = flash._backward_cuda(d, q, k, v, out, lse, SEGMENTS, 0.3, window, kept)
    for a, b in zip(gradients, flash.backward(d, q, k, v, wanted, wanted_lse, SEGMENTS, 0.3, window, None), strict=True):
        assert a.dtype == torch.float32 and torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_the_real_operators_take_the_arguments_they_are_given(window):
    # meta tensors go through the operators' own schemas and shape rules, without a GPU
    q, k, v = (x.to("meta") for x in tensors(torch.bfloat16))
    segments = [Segment(0, 0, 6, 0), Segment(6, 7, 14, 6)]  # no index: meta tensors hold none
    out, lse, kept = flash._forward_cuda(q, k[:14], v[:14], segments, 0.3, window)
    assert out.shape == q.shape and lse.shape == (ROWS, 4) and lse.dtype == torch.float32
    gradients = flash._backward_cuda(q, q, k[:14], v[:14], out, lse, segments, 0.3, window, kept)
    assert [g.shape for g in gradients] == [q.shape, (14, 2, 8), (14, 2, 8)]


def test_a_log_sum_exp_of_another_shape_is_not_used(monkeypatch):
    def padded(q, k, v, *_, **__):
        return q, torch.zeros(3, 4, 5), torch.empty(0), torch.empty(0), torch.empty(0)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", padded)
    with pytest.raises(flash.AttentionError, match="log-sum-exp of shape"):
        flash._forward_cuda(*tensors(), SEGMENTS, 0.3, None)


def test_on_cuda_the_variable_length_kernel_is_taken_and_elsewhere_not(monkeypatch):
    taken = []

    class Somewhere:
        device, dtype, shape = CUDA, torch.bfloat16, (ROWS, 4, 8)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "_forward_cuda", lambda *a: taken.append("forward"))
    monkeypatch.setattr(flash, "_backward_cuda", lambda *a: taken.append("backward"))
    flash.forward(Somewhere, None, None, SEGMENTS, 0.3, None)
    flash.backward(None, Somewhere, None, None, None, None, SEGMENTS, 0.3, None, None)
    flash.forward(*tensors(), SEGMENTS, 0.3, None)
    assert taken == ["forward", "backward"]


def test_gradients_do_not_depend_on_how_threads_share_the_heads(monkeypatch):
    q, k, v = tensors()
    out, lse, _ = flash.forward(q, k, v, SEGMENTS, 0.3, None)
    found = []
    for threads in (1, 3):  # two key-value heads: even for one thread, uneven for three
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(flash.backward(q, q, k, v, out, lse, SEGMENTS, 0.3, None, None))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


# --- CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("dense", [False, True], ids=["fused", "plain"])
def test_out_and_log_sum_exp_are_the_plain_ones(monkeypatch, window, dense):
    if dense:
        monkeypatch.setattr(flash, "fused", lambda *_: False)
    q, k, v = tensors()
    out, lse, _ = flash.forward(q, k, v, SEGMENTS, 0.3, window)
    for a, b in zip((out, lse), plain(q, k, v, SEGMENTS, 0.3, window), strict=True):
        assert torch.allclose(a.double(), b, atol=1e-6)
