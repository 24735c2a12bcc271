"""Chain speculation gives the verifier's own output, whatever the draft proposes."""

import random

import pytest
import torch
from speculators.losses import resolve_loss_config

from helpers import acceptance, decoding, drafting, replaying, speculative, ttt, verifier
from helpers.conversations import prompt_ids, read_prompts

CONFIDENCE = 0.1  # between the certainties of this random draft, so that it stops at some places and not at others


@pytest.fixture(scope="module")
def tiny():
    return verifier.load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def prompts(tiny):
    found = read_prompts("data/prompts/evaluation.jsonl").rows[:9]
    return [prompt_ids(tiny.tokenizer, p.turns()[0])[-n:] for p, n in zip(found, (40, 7, 90, 12, 33, 33, 1, 61, 20), strict=True)]


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    return speculative.decode(tiny, prompts, max_tokens=30, batch_rows=4)


def test_plain_decoding_equals_transformers_generate(tiny, prompts, plain):
    reference = verifier.load("tiny", dtype="float32", attention="eager")
    for prompt, tokens in zip(prompts, plain.tokens, strict=True):
        made = reference.model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
        assert tokens == made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_output_is_unchanged_by_any_draft(tiny, prompts, plain, make_draft, k, rows):
    drafter = speculative.Drafter(make_draft().eval())
    found = speculative.decode(tiny, prompts, max_tokens=30, drafter=drafter, k=k, batch_rows=rows)
    assert found.tokens == plain.tokens
    records = found.records([str(i) for i in range(9)], ["c"] * 9, drafter.inside)
    assert all(1 + sum(r["emitted"]) == len(r["tokens"]) for r in records)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 0.7])
def test_right_guesses_are_accepted_and_the_first_wrong_one_ends_the_chain(tiny, prompts, plain, make_draft, monkeypatch, wrong):
    """Guesses are the true continuation, each spoilt with probability `wrong`: what is accepted is then known."""
    chance, prompt, truth = random.Random(3), prompts[0], plain.tokens[0]
    expected = []

    def oracle(_drafter, cache, _hidden, k):
        at = cache.get_seq_length() - len(prompt) + 1
        guesses, m = [], None
        for i in range(k):
            right = truth[at + i] if at + i < len(truth) else 0
            spoilt = chance.random() < wrong
            if spoilt and m is None:
                m = i
            guesses.append((right + 1) % 512 if spoilt else right)
        expected.append(k if m is None else m)
        return torch.tensor([guesses])

    monkeypatch.setattr(drafting, "greedy", oracle)
    found = speculative.decode(tiny, [prompt], max_tokens=30, drafter=speculative.Drafter(make_draft().eval()), k=3)
    assert found.tokens[0] == truth
    complete = [(s["accepted"], e) for s, e in zip(found.steps[0], expected, strict=True)][:-1]
    assert complete and all(a == e for a, e in complete)
    if wrong == 0.0:
        assert all(a == 3 for a, _ in complete)


def test_an_end_of_turn_inside_an_accepted_run_stops_there(tiny, prompts, plain, make_draft, monkeypatch):
    truth = plain.tokens[0]
    stop = truth[5]
    cut = truth[: truth.index(stop) + 1]
    monkeypatch.setattr(verifier.Verifier, "end_ids", property(lambda self: {stop}))

    def oracle(_drafter, cache, _hidden, k):
        at = cache.get_seq_length() - len(prompts[0]) + 1
        return torch.tensor([truth[at : at + k] + [0] * (k - len(truth[at : at + k]))])

    monkeypatch.setattr(drafting, "greedy", oracle)
    found = speculative.decode(tiny, [prompts[0]], max_tokens=30, drafter=speculative.Drafter(make_draft().eval()), k=4)
    assert found.tokens[0] == cut
    assert sum(len(s["emitted"]) for s in found.steps[0]) == len(cut) - 1


def test_the_token_limit_cuts_the_last_step(tiny, prompts, make_draft):
    for limit in (1, 2, 5):
        found = speculative.decode(tiny, prompts, max_tokens=limit, drafter=speculative.Drafter(make_draft().eval()), k=3)
        assert all(len(t) == limit or t[-1] in tiny.end_ids for t in found.tokens)


def test_draft_entries_match_the_training_step(tiny, make_draft, make_batch):
    """Decoding token by token sees what one TTT pass sees: proposals along a teacher-forced chain are the same."""
    model = make_draft().eval()
    torch.manual_seed(1)
    ids = torch.randint(0, 512, (1, 21))
    states = tiny.states(ids, [2, 4, 5])[0]
    batch = make_batch([20], [[1] * 20])
    batch |= {
        "hidden_states": states[:-1, :3].flatten(1)[None],
        "input_ids": ids[:, 1:],
        "verifier_last_hidden_states": states[1:, 3][None],
    }
    with torch.no_grad():
        trained, *_ = model(**batch, ttt_steps=3, loss_config=resolve_loss_config("kl_div", "eager"))
    drafter = speculative.Drafter(model)
    for i in range(15):
        cache = speculative.RowCache(32)
        with torch.inference_mode():
            hidden = drafter.advance(cache, ids[:, 1 : i + 2], drafter.features(states[None, : i + 1, :3].flatten(2)))[:, -1]
            for step in range(3):
                assert drafter.propose(hidden).argmax(-1).item() == trained[step][0, i].item()
                if step < 2:
                    hidden = drafter.advance(cache, ids[:, i + 2 + step : i + 3 + step], hidden[:, None])[:, -1]


def test_replay_over_stored_states_equals_live_decoding_step_by_step(tiny, prompts, make_draft, monkeypatch):
    model = make_draft(draft_vocab_size=512).eval()
    with torch.no_grad():
        model.fc.weight.mul_(0.05)  # a draft that leans on the last token is right now and then
    drafter = speculative.Drafter(model)
    live = speculative.decode(tiny, prompts, max_tokens=30, drafter=drafter, k=3, batch_rows=4)
    seen = 0
    for prompt, tokens, steps in zip(prompts, live.tokens, live.steps, strict=True):
        ids = [*prompt, *tokens]
        states = tiny.states(torch.tensor([ids]), [2, 4, 5])[0, :, :3].flatten(1)
        replayed = speculative.replay(drafter, ids, states, len(prompt), 3)
        assert [s["emitted"] for s in replayed] == [s["emitted"] for s in steps]
        for a, b in zip(replayed, steps, strict=True):
            assert a["drafted"] == b["drafted"][: len(a["drafted"])]
            seen += a["accepted"]
        monkeypatch.setattr(replaying, "SLOTS", len(ids) * 7)  # places in parts
        foreseen = replaying.foresee(drafter, ids, states, len(prompt), 5)
        assert replaying.walk(foreseen, 3) == replayed
        assert replaying.walk(replaying.Foreseen.of(foreseen.row()), 3) == replayed
    assert seen > 0  # otherwise nothing but first guesses was compared


@pytest.mark.parametrize("rows", [1, 4])
def test_stopping_when_unsure_changes_the_drafting_and_not_the_output(tiny, prompts, plain, make_draft, rows):
    """Replay tells the number drafted at every step exactly; each row of a batch stops by itself."""
    model = make_draft(draft_vocab_size=512).eval()
    with torch.no_grad():
        model.fc.weight.mul_(0.05)
    drafter, numbers = speculative.Drafter(model), set()
    found = speculative.decode(tiny, prompts, max_tokens=30, drafter=drafter, k=4, confidence=CONFIDENCE, batch_rows=rows)
    assert found.tokens == plain.tokens
    for prompt, tokens, steps in zip(prompts, found.tokens, found.steps, strict=True):
        ids = [*prompt, *tokens]
        states = tiny.states(torch.tensor([ids]), [2, 4, 5])[0, :, :3].flatten(1)
        walked = replaying.walk(replaying.foresee(drafter, ids, states, len(prompt), 4), 4, CONFIDENCE)
        assert [s["emitted"] for s in walked] == [s["emitted"] for s in steps]
        for a, b in zip(walked, steps, strict=True):
            assert a["drafted"] == b["drafted"][: len(a["drafted"])]
        numbers |= {len(s["drafted"]) for s in steps}
    assert numbers >= {0, 1} and len(numbers) > 2  # it did stop, at different places
    records = found.records([str(i) for i in range(9)], ["c"] * 9, None)
    drafted = [n for r in records for n in r["drafted"]]
    assert [p["drafted"] for p in acceptance.by_position(records)] == [sum(n > i for n in drafted) for i in range(max(drafted))]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_sliding_window_hides_at_decoding_what_it_hid_in_training(make_draft, make_batch, layers):
    """Entries written at once, in pieces, or one by one: the states of the first training step, which sees the window alone."""
    model = make_draft(window=6, draft_layers=layers).eval()
    batch = make_batch([20], [[1] * 20]) | {"position_ids": torch.arange(1, 21)[None]}
    seen = []
    hook = model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        ttt.forward(model, **batch, ttt_steps=1)
    hook.remove()
    drafter = speculative.Drafter(model)
    for pieces in ([20], [9, 4, 7], [1] * 20):
        cache, found, at = decoding.RowCache(32), [], 0
        for n in pieces:
            with torch.no_grad():
                features = drafter.features(batch["hidden_states"][:, at : at + n])
                found.append(drafter.advance(cache, batch["input_ids"][:, at : at + n], features))
            at += n
        assert torch.allclose(torch.cat(found, 1)[0], seen[0], atol=1e-5), pieces
    wide = make_draft(draft_layers=layers).eval()
    with torch.no_grad():
        other = speculative.Drafter(wide)
        full = other.advance(decoding.RowCache(32), batch["input_ids"], other.features(batch["hidden_states"]))
    assert not torch.allclose(full[0], seen[0], atol=1e-3)
