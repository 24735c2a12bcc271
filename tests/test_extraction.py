"""Answers and hidden states on the tiny verifier: the same as by the plain way, whole after any fault, nothing lost or doubled."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import answers, extraction, verifier
from helpers.answers import Answered
from helpers.conversations import answer_text, prompt_ids, read_prompts
from helpers.errors import DamagedInput, DataError, DiskFull
from helpers.verifier import Verifier

IDS = [2, 4, 5]
LIMIT = {"max_tokens": 12, "max_sequence_tokens": 256, "batch_rows": 3}


def silent(_line):
    pass


@pytest.fixture(scope="module")
def tiny():
    return verifier.load("tiny")


@pytest.fixture(scope="module")
def talkative(tiny):
    """A verifier that ends most answers within a few tokens: half of the vocabulary ends a turn."""
    found = tiny.in_dtype(torch.float32)
    found.model.generation_config.eos_token_id = [2, *range(256, 512)]
    return found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Nine prompts of unequal length; the second has three turns."""
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"id": f"p{i}", "category": "odd" if i % 2 else "even", "turns": ["Why is the sky blue? " * (1 + i % 4)]} for i in range(9)]
    rows[1]["turns"] = ["Who wrote it?", "And when?", "Where?"]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return sorted(read_prompts(path).rows, key=lambda p: p.id)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def found(tiny, prompts, tmp_path_factory):
    """Nine rows as the notebook makes them."""
    answered = extraction.answer(tiny, prompts, tmp_path_factory.mktemp("a") / "answers.jsonl", report=silent, **LIMIT)
    return extraction.rows(tiny, answered, max_tokens=256)


@pytest.fixture(scope="module")
def stored(tiny, found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "dataset"
    extraction.save_dataset(found, folder)
    extraction.extract(tiny, found, folder, IDS, batch_tokens=200, report=silent)
    return folder


@pytest.fixture
def folder(stored, tmp_path):
    return shutil.copytree(stored, tmp_path / "dataset")


# --- order and batches -------------------------------------------------------------------------------------------


def test_example_comes_first_under_any_limit(prompts):
    assert [p.id for p in extraction.order(prompts, "p4", 3)] == ["p4", "p0", "p1"]
    assert sorted(p.id for p in extraction.order(prompts, "p4")) == [p.id for p in prompts]


def test_unknown_example_is_refused_with_ids_to_choose_from(prompts):
    with pytest.raises(DataError, match="no prompt has the id 'p99'") as refused:
        extraction.order(prompts, "p99")
    assert refused.value.where == "parameter example_id" and "p0, p1" in refused.value.do


def test_batches_hold_every_row_once_longest_first_within_budget_and_rows():
    lengths = [random.Random(0).randint(1, 90) for _ in range(50)]
    plan = list(extraction.batches(lengths, budget=200, rows=7))
    assert sorted(i for batch in plan for i in batch) == list(range(50))
    assert all(len(b) <= 7 and len(b) * max(lengths[i] for i in b) <= 200 for b in plan)
    flat = [lengths[i] for batch in plan for i in batch]
    assert flat == sorted(flat, reverse=True)


def test_row_longer_than_the_budget_is_a_batch_of_its_own():
    assert list(extraction.batches([5, 300, 6], budget=100)) == [[1], [2, 0]]


@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 15, 16, 17, 100, 999])
def test_progress_is_at_most_eight_lines_and_says_when_it_is_done(total):
    said = [n for n in range(1, total + 1) if answers.due(n, total)]
    assert len(said) <= 8 and said[-1] == total


# --- answers -----------------------------------------------------------------------------------------------------


def plainly(model, ids, max_tokens):
    """transformers' own greedy generate, one prompt at a time, its own cache and attention."""
    ends = sorted(model.end_ids)
    out = model.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=ends, pad_token_id=2,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def test_batched_answers_equal_generate_prompt_by_prompt(talkative, prompts):
    asked = [prompt_ids(talkative.tokenizer, p.turns()[0]) for p in prompts]
    ended = extraction.generate(talkative, asked, max_tokens=40)
    assert ended == [plainly(talkative, ids, 40) for ids in asked]
    assert len({len(a) for a in ended}) > 2  # rows ended one after another


def test_rows_that_go_on_when_others_have_left_equal_generate(tiny, prompts):
    model = tiny.in_dtype(torch.float32)
    asked = [prompt_ids(model.tokenizer, p.turns()[0]) for p in prompts[:4]]
    endless = [plainly(model, ids, 40) for ids in asked]  # two segments of at most 32 tokens
    end = next(t for t in endless[0][:30] if any(t not in answer for answer in endless))
    model.model.generation_config.eos_token_id = [2, end]
    expected = [answer[: answer.index(end) + 1] if end in answer else answer for answer in endless]
    assert extraction.generate(model, asked, max_tokens=40) == expected
    assert len(expected[0]) <= 30 and max(map(len, expected)) == 40


def test_penalties_of_the_checkpoint_do_not_bend_the_answers(talkative, prompts):
    asked = [prompt_ids(talkative.tokenizer, p.turns()[0]) for p in prompts[:4]]
    before = extraction.generate(talkative, asked, max_tokens=20)
    bent = talkative.in_dtype(torch.float32)
    bent.model.generation_config.repetition_penalty = 3.0
    bent.model.generation_config.suppress_tokens = sorted({a[0] for a in before})
    assert [plainly(bent, ids, 20) for ids in asked] != before  # they would, were they used
    assert extraction.generate(bent, asked, max_tokens=20) == before


def test_sampled_answers_repeat_by_seed(tiny, prompts):
    asked = [prompt_ids(tiny.tokenizer, p.turns()[0]) for p in prompts[:3]]
    one, two, other = (extraction.generate(tiny, asked, max_tokens=10, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert one == two != other


def test_several_turns_are_answered_in_order_each_after_the_verifiers_own(talkative, prompts, tmp_path):
    answered = extraction.answer(talkative, prompts, tmp_path / "a.jsonl", report=silent, **LIMIT | {"max_tokens": 60})
    row = answered[1]
    assert [p.prompt.id for p in answered] == [p.id for p in prompts] and len(row.turns) == 3 and row.ended
    history = []
    for chunk, (given, said) in zip(row.prompt.turns(), row.turns, strict=True):
        history += chunk
        assert given == prompt_ids(talkative.tokenizer, history) and said == plainly(talkative, given, 60)
        history.append({"role": "assistant", "content": answer_text(talkative.tokenizer, said)})
    assert row.messages(talkative.tokenizer) == history


def test_row_of_several_turns_is_the_last_prompt_and_answer_with_earlier_answers_supervised(talkative, prompts, tmp_path):
    answered = extraction.answer(talkative, prompts[1:2], tmp_path / "a.jsonl", report=silent, **LIMIT | {"max_tokens": 60})
    row = extraction.rows(talkative, answered, max_tokens=256)[0]
    given, said = answered[0].turns[-1]
    assert row.input_ids == given + said and row.loss_mask[len(given) :] == [1] * len(said)
    assert extraction.spoken(row.input_ids, row.loss_mask)[-1] == said
    for given, said in answered[0].turns[:-1]:  # as far as their text gave the same tokens again
        same = next((n for n, (a, b) in enumerate(zip(said, row.input_ids[len(given) :], strict=False)) if a != b), len(said))
        assert row.input_ids[: len(given)] == given and row.loss_mask[len(given) : len(given) + same] == [1] * same
        assert row.loss_mask[len(given) + same] == 0


def test_conversation_whose_answer_was_cut_is_not_asked_on(tiny, prompts, tmp_path):
    row = extraction.answer(tiny, prompts[1:2], tmp_path / "a.jsonl", report=silent, **LIMIT)[0]  # the tiny verifier never ends
    assert len(row.turns) == 1 and len(row.turns[0][1]) == 12 and not row.ended


def test_later_turn_that_does_not_fit_ends_its_conversation(talkative, prompts, tmp_path):
    long = replace(prompts[1], messages=[prompts[1].messages[0], {"role": "user", "content": "why? " * 300}])
    row = extraction.answer(talkative, [long], tmp_path / "a.jsonl", report=silent, **LIMIT | {"max_tokens": 60})[0]
    assert len(row.prompt.turns()) == 2 and len(row.turns) == 1 and row.ended


def test_prompts_without_room_for_an_answer_are_refused_all_of_them_named(tiny, prompts, tmp_path):
    with pytest.raises(DataError, match="leave no room for 12 answer tokens within 60") as refused:
        extraction.answer(tiny, prompts, tmp_path / "a.jsonl", report=silent, **LIMIT | {"max_sequence_tokens": 60})
    too_long = [p.id for p in prompts if len(prompt_ids(tiny.tokenizer, p.turns()[0])) + 12 > 60]
    assert too_long and all(f"{name}: " in refused.value.what for name in too_long)
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_file_cut_at_any_byte_ends_as_the_undisturbed_one(tiny, prompts, tmp_path, temperature):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "a.jsonl"
    settings = {**LIMIT, "temperature": temperature, "report": silent}
    expected = extraction.answer(tiny, prompts, whole, **settings)
    raw = whole.read_bytes()
    line_end = raw.index(b"\n", len(raw) // 2)
    for cut in (5, line_end, line_end + 1):  # a line torn, without its line end alone, and whole
        path.write_bytes(raw[:cut])
        assert extraction.answer(tiny, prompts, path, **settings) == expected
        assert path.read_bytes() == raw, cut


def test_damaged_line_in_the_middle_costs_that_answer_only(tiny, prompts, tmp_path):
    path = tmp_path / "a.jsonl"
    expected = extraction.answer(tiny, prompts, path, report=silent, **LIMIT)
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:4], rows[4][:20] + "\n", "[1]\n", *rows[5:]]))
    assert len(extraction.read_answers(path)) == len(rows) - 1
    assert extraction.answer(tiny, prompts, path, report=silent, **LIMIT) == expected
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(rows)


def test_complete_answers_are_read_without_a_forward_pass(tiny, prompts, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    expected, said = extraction.answer(tiny, prompts, path, report=silent, **LIMIT), []
    monkeypatch.setattr(answers, "generate", lambda *a, **k: pytest.fail("generated again"))
    assert extraction.answer(tiny, prompts, path, report=said.append, **LIMIT) == expected and len(said) == 1


def test_everything_is_made_again_when_asked_for(tiny, prompts, folder, monkeypatch):
    path, made = folder.parent / "a.jsonl", []
    answered = extraction.answer(tiny, prompts, path, report=silent, **LIMIT)
    raw, before = path.read_bytes(), contents(folder)
    monkeypatch.setattr(answers, "generate", lambda *a, generate=answers.generate, **k: made.append(1) or generate(*a, **k))
    assert extraction.answer(tiny, prompts, path, report=silent, again=True, **LIMIT) == answered
    assert len(made) == 3 and path.read_bytes() == raw  # nine prompts in batches of three
    rows = extraction.rows(tiny, answered, max_tokens=256)
    assert extraction.extract(tiny, rows, folder, IDS, batch_tokens=200, again=True, report=silent) == 9
    assert contents(folder) == before


def test_answer_to_another_prompt_under_the_same_id_is_made_again(tiny, prompts, tmp_path):
    path = tmp_path / "a.jsonl"
    extraction.answer(tiny, prompts[:3], path, report=silent, **LIMIT)
    changed = [replace(prompts[0], messages=[{"role": "user", "content": "Something else."}]), *prompts[1:3]]
    expected = extraction.answer(tiny, changed, tmp_path / "fresh.jsonl", report=silent, **LIMIT)
    assert extraction.answer(tiny, changed, path, report=silent, **LIMIT) == expected
    assert extraction.answer(tiny, changed, path, report=silent, **LIMIT) == expected


def test_full_disk_while_answering_keeps_the_answers_before_and_no_half_line(tiny, prompts, tmp_path, monkeypatch):
    path, sync, calls = tmp_path / "a.jsonl", os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(answers.os, "fsync", full)
    with pytest.raises(DiskFull, match=r"a\.jsonl"):
        extraction.answer(tiny, prompts, path, report=silent, **LIMIT)
    assert len(lines(path)) == 3  # the first batch
    whole = tmp_path / "whole.jsonl"
    assert extraction.answer(tiny, prompts, path, report=silent, **LIMIT) == extraction.answer(tiny, prompts, whole, report=silent, **LIMIT)
    assert path.read_bytes() == whole.read_bytes()


# --- rows and the dataset ----------------------------------------------------------------------------------------


def test_conversations_are_written_in_the_order_of_the_rows_and_read_back(tiny, prompts, tmp_path):
    answered = extraction.answer(tiny, prompts, tmp_path / "a.jsonl", report=silent, **LIMIT)
    made = extraction.rows(tiny, answered, max_tokens=256)
    talks = extraction.conversations(tiny.tokenizer, answered, made)
    talks[0]["messages"][1]["content"] += "\u2028 next line"  # a line end to some, not to JSON lines
    extraction.files.write_lines(tmp_path / "c.jsonl", talks)
    assert extraction.load_conversations(tmp_path / "c.jsonl") == talks
    assert [(t["id"], t["category"], t["tokens"]) for t in talks] == [
        (p.id, p.category, len(r.input_ids)) for p, r in zip(prompts, made, strict=True)
    ]
    with pytest.raises(DamagedInput):
        extraction.load_conversations(tmp_path / "none.jsonl")


def test_spoken_gives_each_run_of_supervised_tokens():
    assert extraction.spoken([1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 0, 1]) == [[2, 3], [6]]
    assert extraction.spoken([1, 2], [0, 0]) == []


@pytest.mark.parametrize("count, share", [(9, 0.2), (10, 0.2), (24, 0.2), (900, 0.08), (100, 0.1), (7, 0.5)])
def test_split_is_where_the_library_cuts(count, share):
    training = extraction.split(count, share)
    assert training == int(count * (1.0 - share))  # speculators 0.9.0, ArrowDataset.__init__, with train_ratio = 1 - share


def test_split_without_a_row_on_either_side_is_refused():
    for count, share in ((1, 0.2), (3, 0.8), (0, 0.5)):
        with pytest.raises(DataError, match="to train on"):
            extraction.split(count, share)
    assert extraction.split(2, 0.5) == 1


def test_library_reads_the_folder_unchanged(stored, found):
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset

    def reader(part):
        transfer = FileTransfer(stored / "hidden_states")
        return ArrowDataset(max_len=256, datapath=stored, transfer=transfer, on_missing="raise", train_ratio=1.0 - 0.3, split=part)

    train, held_out = reader("train"), reader("val")
    assert len(train) == extraction.split(len(found), 0.3) and len(train) + len(held_out) == len(found)
    for i, row in enumerate([*(train[i] for i in range(len(train))), *(held_out[i] for i in range(len(held_out)))]):
        states, tokens = load_file(extraction.shard(stored, i))["hidden_states"], len(found[i].input_ids)
        assert row["input_ids"].tolist() == found[i].input_ids and row["loss_mask"].tolist() == found[i].loss_mask
        assert row["input_ids"].dtype == row["loss_mask"].dtype == torch.int64 and int(row["lengths"]) == tokens
        assert row["hidden_states"].shape == (tokens, 3 * 64) and row["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(row["hidden_states"], states[:, :3].flatten(1))
        assert torch.equal(row["verifier_last_hidden_states"], states[:, 3])


def test_dataset_reads_back_and_is_written_the_same_twice(stored, found, tmp_path):
    assert extraction.load_rows(stored) == [(r.input_ids, r.loss_mask) for r in found]
    (tmp_path / ".999..d.new").mkdir(parents=True)  # left by a killed process
    for _ in range(2):
        extraction.save_dataset(found, tmp_path / "d")
    names = [f.name for f in stored.iterdir() if f.is_file()]
    assert names and all((tmp_path / "d" / n).read_bytes() == (stored / n).read_bytes() for n in names)
    assert [f.name for f in tmp_path.iterdir()] == ["d"]


def test_unreadable_dataset_is_named(tmp_path):
    with pytest.raises(DamagedInput, match="no readable dataset"):
        extraction.load_rows(tmp_path)


# --- shards ------------------------------------------------------------------------------------------------------


def test_stored_states_are_those_of_each_row_alone(tiny, found, stored):
    for i, row in enumerate(found):
        alone = tiny.states(torch.tensor([row.input_ids]), IDS)[0].float()
        states = extraction.load_states(stored, i)
        assert states.dtype == torch.bfloat16
        # bfloat16 carries 8 bits; a batch of other shape may round each of eight layers otherwise
        assert ((states.float() - alone).norm(dim=-1) / alone.norm(dim=-1)).max() < 0.05


def rewrite(path, states=None, ids=None):
    made = load_file(path)
    new = states(made["hidden_states"]) if states else made["hidden_states"]
    save_file({"hidden_states": new.contiguous(), "token_ids": ids(made["token_ids"]) if ids else made["token_ids"]}, path)


def with_one_nan(states):
    states[3, 1, 5] = torch.nan
    return states


# what is done to a shard, and what its fault has to say; all but NaN show in the header and ids alone
DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "unreadable"),
    "emptied": (lambda p: p.write_bytes(b""), "unreadable"),
    "zeroed": (lambda p: p.write_bytes(bytes(p.stat().st_size)), "unreadable"),
    "header bit": (lambda p: p.write_bytes(p.read_bytes()[:20] + b"\xff" + p.read_bytes()[21:]), "unreadable"),
    "wrong ids": (lambda p: rewrite(p, ids=lambda i: i + 1), "token ids differ"),
    "too few layers": (lambda p: rewrite(p, lambda s: s[:, 1:]), "shape [{tokens}, 3, 64], expected [{tokens}, 4, 64]"),
    "too narrow": (lambda p: rewrite(p, lambda s: s[..., :32]), "shape [{tokens}, 4, 32], expected [{tokens}, 4, 64]"),
    "too short": (lambda p: rewrite(p, lambda s: s[:-1]), "expected [{tokens}, 4, 64]"),
    "one NaN": (lambda p: rewrite(p, with_one_nan), "holds NaN or infinity"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_shard_is_found_named_and_made_again_and_no_other(what, tiny, found, stored, folder):
    damage, words = DAMAGE[what]
    path, ids = extraction.shard(folder, 4), found[4].input_ids
    damage(path)
    fault = extraction.shard_fault(path, ids, 4, 64, values=True)
    assert fault and words.format(tokens=len(ids)) in fault
    others, said = {p: p.stat().st_mtime_ns for p in path.parent.iterdir() if p != path}, []
    assert extraction.extract(tiny, found, folder, IDS, batch_tokens=200, verify=True, report=said.append) == 1
    assert any(f"hs_4.safetensors {fault}" in line for line in said)
    assert {p: p.stat().st_mtime_ns for p in path.parent.iterdir() if p != path} == others
    assert extraction.shard_fault(path, ids, 4, 64, values=True) is None
    assert path.read_bytes() == extraction.shard(stored, 4).read_bytes()


def test_numbers_are_read_only_when_asked_for(tiny, found, folder):
    rewrite(extraction.shard(folder, 4), with_one_nan)
    assert extraction.shard_fault(extraction.shard(folder, 4), found[4].input_ids, 4, 64) is None
    assert extraction.extract(tiny, found, folder, IDS, batch_tokens=200, report=silent) == 0
    assert extraction.extract(tiny, found, folder, IDS, batch_tokens=200, verify=True, report=silent) == 1


def test_row_made_again_is_computed_among_the_same_rows_as_before(tiny, found, folder, monkeypatch):
    states, batches = Verifier.states, []
    monkeypatch.setattr(Verifier, "states", lambda self, ids, layers: batches.append(ids.tolist()) or states(self, ids, layers))
    extraction.extract(tiny, found, folder, IDS, batch_tokens=200, again=True, report=silent)
    first, tokens = batches.copy(), found[4].input_ids
    extraction.shard(folder, 4).unlink()
    assert extraction.extract(tiny, found, folder, IDS, batch_tokens=200, report=silent) == 1
    again = batches[len(first) :]
    assert again == [b for b in first if any(row[: len(tokens)] == tokens for row in b)] and len(again[0]) > 1


def test_files_that_a_killed_process_left_half_written_are_removed(tiny, found, folder):
    (folder / "hidden_states" / ".123.hs_0.safetensors").write_bytes(b"half")
    before = contents(folder)
    extraction.extract(tiny, found, folder, IDS, batch_tokens=200, report=silent)
    assert before.keys() - contents(folder).keys() == {"hidden_states/.123.hs_0.safetensors"}


def test_any_flipped_bit_of_a_header_is_found_or_changes_nothing(tmp_path):
    path, states = tmp_path / "hs_0.safetensors", torch.randn(6, 4, 8).bfloat16()
    save_file({"hidden_states": states, "token_ids": torch.arange(6)}, path)
    raw = bytearray(path.read_bytes())
    for bit in range(8 * (8 + int.from_bytes(raw[:8], "little"))):
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        if extraction.shard_fault(path, range(6), 4, 8, values=True) is None:
            assert torch.equal(load_file(path)["hidden_states"], states), bit
        raw[bit // 8] ^= 1 << bit % 8


def test_unreadable_states_are_named(folder):
    extraction.shard(folder, 0).write_bytes(b"no shard")
    with pytest.raises(DamagedInput, match="cannot be read") as refused:
        extraction.load_states(folder, 0)
    assert "hs_0.safetensors" in refused.value.where


def test_full_disk_while_extracting_leaves_whole_shards_and_goes_on_from_them(tiny, found, stored, tmp_path, monkeypatch):
    write, calls = extraction.save_file, []

    def full(tensors, path):
        calls.append(path)
        write(tensors, path)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "dataset"
    monkeypatch.setattr(extraction, "save_file", full)
    with pytest.raises(DiskFull, match=r"hs_\d+\.safetensors"):
        extraction.extract(tiny, found, folder, IDS, batch_tokens=200, report=silent)
    monkeypatch.undo()
    faults = [extraction.shard_fault(extraction.shard(folder, i), r.input_ids, 4, 64, values=True) for i, r in enumerate(found)]
    whole = faults.count(None)
    assert 3 <= whole < len(found) and set(faults) == {None, "missing"}
    assert len(list((folder / "hidden_states").iterdir())) == whole  # no half-written file
    extraction.extract(tiny, found, folder, IDS, batch_tokens=200, report=silent)
    assert sorted(f.name for f in (folder / "hidden_states").iterdir()) == sorted(f.name for f in (stored / "hidden_states").iterdir())


def test_full_disk_while_writing_the_dataset_keeps_the_one_before(found, folder, monkeypatch):
    import datasets

    def full(self, path, **_):
        os.makedirs(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    before = contents(folder)
    monkeypatch.setattr(datasets.Dataset, "save_to_disk", full)
    with pytest.raises(DiskFull):
        extraction.save_dataset(found[:3], folder)
    assert contents(folder) == before and [f.name for f in folder.parent.iterdir()] == [folder.name]


def test_memory_is_three_batches_at_most_however_slow_the_disk(tiny, found, tmp_path, monkeypatch):
    computed, written, most = [], [], []
    states, write = Verifier.states, extraction._write

    def counted(self, *arguments):
        computed.append(1)
        most.append(len(computed) - len(written))
        return states(self, *arguments)

    def slow(*arguments):
        time.sleep(0.05)
        assert threading.current_thread() is not threading.main_thread()
        write(*arguments)
        written.append(1)

    monkeypatch.setattr(Verifier, "states", counted)
    monkeypatch.setattr(extraction, "_write", slow)
    extraction.extract(tiny, found, tmp_path, IDS, batch_tokens=16, report=silent)  # a batch per row
    # two wait while one is computed; had the writer been waited for after each batch, it would be one
    assert len(computed) == len(written) == len(found) and max(most) == 3


# --- killed ------------------------------------------------------------------------------------------------------


def everything(model, prompts, folder, pause):
    """What notebook 01 writes, from wherever an earlier process stopped; `pause` seconds at every line of progress."""
    torch.set_num_threads(1)  # a forked child has none of its parent's threads

    def report(_line):
        time.sleep(pause)

    answered: list[Answered] = extraction.answer(model, prompts, folder / "answers.jsonl", report=report, **LIMIT)
    found = extraction.rows(model, answered, max_tokens=256)
    extraction.save_dataset(found, folder / "dataset")
    extraction.extract(model, found, folder / "dataset", IDS, batch_tokens=100, verify=True, report=report)


def in_a_process(*arguments):
    process = multiprocessing.get_context("fork").Process(target=everything, args=arguments)
    process.start()
    return process


def test_killed_at_random_moments_ends_with_the_files_of_an_undisturbed_run(tiny, prompts, tmp_path):
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    for folder in (clean, killed):
        folder.mkdir()
    undisturbed = in_a_process(tiny, prompts, clean, 0.0)
    undisturbed.join()
    assert undisturbed.exitcode == 0
    moments = random.Random(os.getpid())
    for _ in range(3):
        # nine lines of progress or more take 1.4 s, so the three kills together come before the end
        process = in_a_process(tiny, prompts, killed, 0.15)
        process.join(moments.uniform(0.05, 0.4))
        assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    last = in_a_process(tiny, prompts, killed, 0.0)
    last.join()
    assert last.exitcode == 0
    assert contents(killed) == contents(clean)
