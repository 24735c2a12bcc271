"""The audit names what is wrong with a shard: each known cause is built here on the tiny verifier."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import audit, extraction, verifier
from helpers.conversations import Tokenised
from helpers.errors import DataError
from helpers.verifier import Verifier

IDS = [2, 4, 5]
LENGTHS = [40, 57, 33, 40, 64]


@pytest.fixture(scope="module")
def tiny():
    return verifier.load("tiny")


@pytest.fixture(scope="module")
def rows():
    torch.manual_seed(0)
    ids = [torch.randint(3, 512, (n,)).tolist() for n in LENGTHS]
    return [Tokenised(row, [0] * 10 + [1] * (len(row) - 10), "generated", id=f"row-{i}") for i, row in enumerate(ids)]


@pytest.fixture(scope="module")
def stored(tiny, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "dataset"
    extraction.extract(tiny, rows, folder, IDS, batch_tokens=256, report=lambda _: None)
    return folder


@pytest.fixture
def folder(stored, tmp_path):
    return shutil.copytree(stored, tmp_path / "dataset")


def change(folder, i, states=None, ids=None):
    """Rewrite shard i with what the functions make of its states and token ids."""
    path = extraction.shard(folder, i)
    made = load_file(path)
    new = states(made["hidden_states"]) if states else made["hidden_states"]
    save_file({"hidden_states": new.contiguous(), "token_ids": ids(made["token_ids"]) if ids else made["token_ids"]}, path)


def with_one_nan(states):
    states[7, 1, 3] = torch.nan
    return states


def captured(model, row, ids):
    """States of layers `ids` of one row [T, len(ids), H]."""
    with torch.inference_mode(), model.capture(list(ids)) as found:
        model.decoder(input_ids=torch.tensor([row.input_ids]), use_cache=False)
    return torch.stack([found[k][0] for k in ids], dim=1)


def by_transformers(model, row, ids):
    """The same by `output_hidden_states`, whose last entry is behind the final norm."""
    with torch.inference_mode():
        found = model.model(input_ids=torch.tensor([row.input_ids]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.stack([found[k][0] for k in ids], dim=1)


def looked_at(tiny, rows, folder, sample=5):
    return audit.audit(tiny, rows, folder, IDS, sample=sample, seed=0)


def test_whole_shards_pass_every_gate_and_their_layers_are_told_apart(tiny, rows, stored):
    found = looked_at(tiny, rows, stored)
    assert [r["row"] for r in found] == [0, 1, 2, 3, 4] and [r["id"] for r in found][0] == "row-0"
    for r in found:
        assert r["cause"] is None and r["found"] == r["claimed"] == [2, 4, 5, 8]
        assert r["distance"] < 0.01 < 0.2 < r["next_layer"]  # so that "nearest" is no close call
        assert r["top1"] == 1.0 and r["cosine"] > 0.999 and abs(r["scale"] - 1) < 0.001 and r["difference"] <= r["allowed"]
    assert all(passed for _, passed, _, _ in audit.verdict(found))
    assert audit.require(found, stored) is found


def test_sample_holds_the_example_and_is_drawn_by_seed():
    assert audit.sampled(100, 6, 1) == audit.sampled(100, 6, 1) != audit.sampled(100, 6, 2)
    chosen = audit.sampled(100, 6, 1)
    assert chosen[0] == 0 and chosen == sorted(set(chosen)) and len(chosen) == 6
    assert audit.sampled(3, 6, 0) == [0, 1, 2] and audit.sampled(1, 1, 0) == [0]


def test_float32_passes_with_its_own_narrow_allowance(tiny, rows, tmp_path):
    exact = tiny.in_dtype(torch.float32)
    extraction.extract(exact, rows, tmp_path, IDS, batch_tokens=256, report=lambda _: None)
    found = looked_at(exact, rows, tmp_path)
    assert [r["cause"] for r in found] == [None] * 5 and found[0]["allowed"] == 1e-3


# what is done to shard 0, and the cause that has to be named
BROKEN = {
    "cut off": (lambda t, r, f: extraction.shard(f, 0).write_bytes(extraction.shard(f, 0).read_bytes()[:-100]), audit.UNREADABLE),
    "gone": (lambda t, r, f: extraction.shard(f, 0).unlink(), audit.UNREADABLE),
    "one NaN": (lambda t, r, f: change(f, 0, with_one_nan), audit.NOT_FINITE),
    "shard of another row": (lambda t, r, f: shutil.copy(extraction.shard(f, 3), extraction.shard(f, 0)), audit.ANOTHER_ROW),
    "ids moved on": (lambda t, r, f: change(f, 0, ids=lambda i: torch.cat([i[1:], i[:1]])), audit.SHIFTED_IDS),
    "ids moved back": (lambda t, r, f: change(f, 0, ids=lambda i: torch.cat([torch.tensor([1]), i])), audit.SHIFTED_IDS),
    "ids of another tokenizer": (lambda t, r, f: change(f, 0, ids=lambda i: (i * 7 + 3) % 512), audit.OTHER_IDS),
    "one state too few": (lambda t, r, f: change(f, 0, lambda s: s[:-1]), audit.LENGTH),
    "two layers": (lambda t, r, f: change(f, 0, lambda s: s[:, 1:]), audit.COUNT),
    "layers in one row": (lambda t, r, f: change(f, 0, lambda s: s.flatten(1)), audit.COUNT),
    "half as wide": (lambda t, r, f: change(f, 0, lambda s: s[..., :32]), audit.WIDTH),
    "ids one too high": (lambda t, r, f: change(f, 0, lambda s: captured(t, r[0], [3, 5, 6, 8])), audit.OFF_BY_ONE),
    "ids one too low": (lambda t, r, f: change(f, 0, lambda s: captured(t, r[0], [1, 3, 4, 7])), audit.OFF_BY_ONE),
    "after the norm": (lambda t, r, f: change(f, 0, lambda s: by_transformers(t, r[0], [2, 4, 5, 8])), audit.AFTER_NORM),
    "one too high and after the norm": (
        lambda t, r, f: change(f, 0, lambda s: by_transformers(t, r[0], [3, 5, 6, 8])),
        f"{audit.OFF_BY_ONE}; {audit.AFTER_NORM}",
    ),
    "last layer first": (lambda t, r, f: change(f, 0, lambda s: s.flip(1)), audit.ORDER),
    "other layers": (lambda t, r, f: change(f, 0, lambda s: captured(t, r[0], [1, 4, 7, 8])), audit.LAYERS),
    "states moved on": (lambda t, r, f: change(f, 0, lambda s: s.roll(-1, 0)), audit.SHIFTED_STATES),
    "states moved back": (lambda t, r, f: change(f, 0, lambda s: s.roll(1, 0)), audit.SHIFTED_STATES),
    "states of another row under these ids": (lambda t, r, f: change(f, 0, lambda s: captured(t, r[3], [2, 4, 5, 8])), audit.FOREIGN),
    "noise": (lambda t, r, f: change(f, 0, lambda s: torch.randn(s.shape).to(s.dtype)), audit.FOREIGN),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_shard_is_named_with_the_cause_that_fits(what, tiny, rows, folder):
    breaking, cause = BROKEN[what]
    breaking(tiny, rows, folder)
    found = looked_at(tiny, rows, folder, sample=2)
    assert [r["cause"] for r in found] == [cause, None]
    failed = [do for _, passed, _, do in audit.verdict(found) if not passed]
    assert failed and all(cause in do for do in failed)
    with pytest.raises(DataError) as refused:
        audit.require(found, folder)
    assert "1 of 2" in refused.value.what and f"hs_0.safetensors: {cause}" in refused.value.what
    assert all(audit.CAUSES[part] in refused.value.do for part in cause.split("; "))


def test_refusal_says_which_layers_were_found_instead(tiny, rows, folder):
    change(folder, 0, lambda s: captured(tiny, rows[0], [3, 5, 6, 8]))
    with pytest.raises(DataError, match=r"claimed \[2, 4, 5, 8\], found \[3, 5, 6, 8\]"):
        audit.require(looked_at(tiny, rows, folder), folder)


def test_states_of_a_verifier_with_other_weights_fit_no_layer(tiny, rows, folder):
    other = tiny.in_dtype(torch.bfloat16)
    torch.manual_seed(1)
    for parameter in other.model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    change(folder, 0, lambda s: other.states(torch.tensor([rows[0].input_ids]), IDS)[0])
    assert looked_at(tiny, rows, folder)[0]["cause"] == audit.FOREIGN


@pytest.mark.parametrize("head", [lambda h: lambda x: 8 * h(x), lambda h: lambda x: h(x).roll(1, -1)], ids=["scaled", "rolled"])
def test_head_that_does_not_make_the_models_logits_is_named(head, tiny, rows, stored):
    found = looked_at(replace(tiny, head=head(tiny.head)), rows, stored)
    assert {r["cause"] for r in found} == {audit.HEAD}
    assert [passed for _, passed, _, _ in audit.verdict(found)] == [True, True, True, False, True]


def test_batch_whose_rows_reach_into_each_other_is_named(tiny, rows, stored, monkeypatch):
    whole = Verifier.states
    monkeypatch.setattr(
        Verifier, "states", lambda self, ids, layers: whole(self, ids, layers) * 0.8 + 0.2 * whole(self, ids, layers).mean(0)
    )
    found = looked_at(tiny, rows, stored)
    assert {r["cause"] for r in found} == {audit.LEAK}
    assert [passed for _, passed, _, _ in audit.verdict(found)] == [True, True, True, True, False]


def test_first_token_with_a_huge_state_hides_nothing():
    # one token of length 1000 that agrees and nine of length 1 that do not: over all tokens together the distance would
    # be sqrt(9 * 2) / 1000 = 0.004, which is "the same"; by token it is (0 + 9 * sqrt(2)) / 10 = 1.27
    a, b = torch.zeros(10, 4), torch.zeros(10, 4)
    a[0, 0] = b[0, 0] = 1000.0
    a[1:, 1] = b[1:, 2] = 1.0
    assert ((a - b).norm() / b.norm()).item() < 0.005
    assert audit.relative(a, b).mean().item() == pytest.approx(0.9 * 2**0.5)
