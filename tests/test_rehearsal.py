"""The gate before a long run: a right chain passes it, a wrong one cannot."""

import pytest
import torch
from transformers import AutoConfig

from helpers import curves, draft, extraction, params, rehearsal, speculative, training, vocab
from helpers.conversations import from_turns
from helpers.verifier import load

SETTINGS = params.Parameters(
    verifier="tiny", verifier_dtype="float32", draft_vocab_size=64, train_batch_tokens=128, max_sequence_tokens=128, answer_max_tokens=40
)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """Two conversations with the tiny verifier's own greedy answers, stored as notebook 01 stores them."""
    folder = tmp_path_factory.mktemp("rows")
    torch.manual_seed(4)
    prompts = [torch.randint(3, 500, (12,)).tolist() for _ in range(2)]
    answers = speculative.decode(tiny, prompts, max_tokens=40).tokens
    rows = [from_turns(tiny.tokenizer, [(p, a)]) for p, a in zip(prompts, answers, strict=True)]
    extraction.save_dataset(rows, folder)
    extraction.extract(tiny, rows, folder, [2, 4, 5], batch_tokens=256, report=lambda _: None)
    return folder, rows


@pytest.fixture
def parts(made, tiny_folder):
    config = AutoConfig.from_pretrained(tiny_folder)
    words = vocab.build(vocab.token_counts([(r.input_ids, r.loss_mask) for r in made[1]], 512), 64, 512)
    proposal, _ = draft.propose(config, SETTINGS, [2, 4, 5])
    data = training.dataset(made[0], SETTINGS.model_copy(update={"heldout_share": 0.5}), "train")
    return draft.speculator_config(proposal, tiny_folder, "sdpa"), words, data


def test_one_overfitted_row_reaches_k_plus_one(tiny, parts, tmp_path):
    config, words, data = parts
    found = rehearsal.gate(config, words, tiny, data[0], tmp_path, SETTINGS)
    assert found["loss after"] < found["loss before"]
    assert all(passed for _, passed, *_ in rehearsal.gate_checks(found))
    assert found["accept length, replayed"] >= 0.9 * found["ceiling by vocabulary"] > 3.0
    assert found["accept length, live"] == pytest.approx(found["accept length, replayed"], abs=0.3)  # float32: the same text


@pytest.mark.parametrize("fault", ["layers", "mask"])
def test_a_wrong_layer_or_a_shifted_mask_does_not_pass(tiny, parts, tmp_path, fault):
    config, words, data = parts
    row = data[0]
    if fault == "layers":
        config.eagle_aux_hidden_state_layer_ids = [1, 3, 4]  # what live decoding reads is not what was stored
    else:
        row = row | {"loss_mask": torch.cat([row["loss_mask"][11:], torch.zeros(11, dtype=row["loss_mask"].dtype)])}
        row["loss_mask"][:3] = 0  # the answer's end is never trained
    found = rehearsal.gate(config, words, tiny, row, tmp_path, SETTINGS)
    assert any(passed is False for _, passed, *_ in rehearsal.gate_checks(found)), found


def test_the_walk_shows_what_is_given_and_what_has_to_be_said(tiny, parts):
    config, words, data = parts
    model = draft.build(config, words.d2t, words.t2d)
    batch = rehearsal.one_row(data, 0, SETTINGS, 64)
    _, said = rehearsal.proposals(model, batch, SETTINGS)
    row = data[0]
    table = rehearsal.walk(batch, said, tiny.tokenizer, rows=3)
    first = int(row["loss_mask"].long().argmax())
    text = repr(tiny.tokenizer.decode([int(row["input_ids"][first])]))
    assert table[0]["given"] == text
    assert table[1]["given"] == table[0]["verifier then says"].split(" ")[0] or " " in table[0]["verifier then says"]
    assert model.training is True


def test_library_and_fast_step_agree_on_the_example(parts):
    config, words, data = parts
    rows = rehearsal.two_ways(config, words, rehearsal.one_row(data, 0, SETTINGS, 64), SETTINGS)
    assert {r["quantity"] for r in rows} >= {"loss", "gradient norm, fc.weight", "gradient norm, norm.weight"}
    assert max(r["relative difference"] for r in rows) < 1e-4


def test_curves_tell_a_falling_loss_from_a_rising_one(make_draft):
    class Run:
        model = make_draft()
        norm_at_start = torch.ones(64)
        curve = [
            {"step": i, "epoch": i // 10, "loss": loss, "learning_rate": 1e-3, "tokens_per_second": 1.0}
            for i, loss in enumerate([3.0] * 10 + [2.0] * 10)
        ]

    for step, length in ((9, 1.2), (19, 1.5)):
        Run.curve[step] |= {"heldout_loss": 1.0, "heldout_accept_length": length, "heldout_cond_acc_0": length - 1}
    both = [{"relative difference": 1e-6}]
    assert all(passed for _, passed, *_ in curves.checks(Run, both))
    summary = curves.summary(Run, {"tokens per epoch": 5, "trained parameters": 7}, {"accept length, replayed": 4.0})
    assert (summary["predicted_accept_length"], summary["kept_epoch"], summary["loss_last_tenth"]) == (1.5, 2, 2.0)
    Run.curve.reverse()
    failed = [name for name, passed, *_ in curves.checks(Run, [{"relative difference": 0.1}]) if not passed]
    assert "training loss fell" in failed and "fast step and library agree in float32" in failed


def test_the_gate_takes_the_longest_answer_that_the_vocabulary_holds_whole():
    ids = torch.arange(10)
    rows = [{"input_ids": ids, "loss_mask": ids >= first} for first in (2, 6, 4)]
    assert rehearsal.gate_row(rows, None) == 0
    inside = [i not in (2, 3) for i in range(10)]  # the first row says 2 and 3, which the draft cannot
    assert rehearsal.gate_row(rows, inside) == 2


def test_the_ceiling_counts_what_the_vocabulary_cuts():
    # k = 2 after token 0: (1, 2, bonus 3), (4; 5 is outside, so 5 itself), (6, 7, bonus 8), (9, 10, bonus 11)
    inside = [i != 5 for i in range(12)]
    assert rehearsal.ceiling(list(range(12)), 0, 2, inside) == pytest.approx((3 + 2 + 3 + 3) / 4)
    assert rehearsal.ceiling(list(range(12)), 0, 2, None) == 3.0
