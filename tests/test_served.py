"""vLLM's count of every verification step is ours: worked out from its tokens, held against its totals, compared fairly."""

import stat
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers import (
    draft,
    drafting,
    environment,
    evaluation,
    extraction,
    files,
    launcher,
    manifest,
    params,
    served,
    speculative,
    training,
    verifier,
    vocab,
)
from helpers.conversations import from_turns, prompt_ids, read_prompts
from helpers.errors import EngineError, MissingInput
from helpers.params import ROOT, STAGES

K, MOST = 3, 24
SMALL = {"evaluation_max_tokens": 40, "draft_vocab_size": 2048, "train_epochs": 6, "train_batch_tokens": 1024, "heldout_share": 0.05}


def as_vllm(record):
    """A chain record as vLLM tells it: tokens, and per step what was accepted and drafted."""
    return {"tokens": record["tokens"], "accepted": record["accepted"], "drafted": record["drafted"]}


def totals(rows):
    """vLLM's counters over rows, counted here in the plainest way."""
    by_position = [0] * K
    for row in rows:
        for accepted in row["accepted"]:
            for position in range(accepted):
                by_position[position] += 1
    return {
        "num_drafts": [sum(len(row["accepted"]) for row in rows)],
        "num_draft_tokens": [sum(sum(row["drafted"]) for row in rows)],
        "num_accepted_tokens": [sum(sum(row["accepted"]) for row in rows)],
        "num_accepted_tokens_per_pos": by_position,
    }


@pytest.fixture(scope="module")
def tiny():
    return verifier.load("tiny", dtype="float32")


@pytest.fixture
def live(tiny, make_draft, monkeypatch):
    """Prompts, their ids and live chain records: every third chain spoilt at one place, some answers stopped by an end of turn."""
    found = read_prompts("data/prompts/evaluation.jsonl").rows[:6]
    ids = [prompt_ids(tiny.tokenizer, p.turns()[0]) for p in found]
    plain = speculative.decode(tiny, ids, max_tokens=MOST).tokens
    stop = plain[0][5]
    monkeypatch.setattr(verifier.Verifier, "end_ids", property(lambda self: {stop}))
    drafter = speculative.Drafter(make_draft().eval())
    records = []
    for n, (prompt, asked, truth) in enumerate(zip(found, ids, plain, strict=True)):
        calls = [0] * n  # another pattern for each prompt

        def guess(_drafter, cache, _hidden, k, *_, truth=truth, asked=asked, calls=calls, **__):
            at = cache.get_seq_length() - len(asked) + 1
            calls.append(at)
            right = [truth[at + i] if at + i < len(truth) else 0 for i in range(k)]
            if len(calls) % 3 == 0:
                right[len(calls) // 3 % k] += 1
            return torch.tensor([right]) % 512

        monkeypatch.setattr(drafting, "greedy", guess)
        made = speculative.decode(tiny, [asked], max_tokens=MOST, drafter=drafter, k=K)
        records += made.records([prompt.id], [prompt.category], drafter.inside)
    assert any(r["emitted"][-1] <= r["accepted"][-1] for r in records), "no step was cut, so the end of an answer goes untested"
    assert any(len(r["tokens"]) < MOST for r in records) and any(len(r["tokens"]) == MOST for r in records)
    return found, ids, records, drafter.inside


def test_steps_worked_out_from_tokens_are_those_of_live_decoding(live):
    found, ids, records, inside = live
    rows = [as_vllm(r) for r in records]
    made = served.records(found, ids, {"rows": rows, "counters": totals(rows)}, inside)
    assert made == [{key: value for key, value in r.items() if key != "guesses"} for r in records]
    assert served.shared(records, made) == (records, made)
    rows = served.positions(records, made)
    assert [row["position"] for row in rows] == [1, 2, 3]
    assert all(row["difference"] == row["difference inside the answer"] == row["difference same text"] == 0.0 for row in rows)
    assert any(row["ours"] != row["ours inside the answer"] for row in rows), "a cut step counts differently in the two ways"


def chain(tokens, accepted):
    """A record whose steps accept so many tokens each, none cut."""
    emitted = [a + 1 for a in accepted]
    miss = ["" if a == K else "wrong" for a in accepted]
    steps = {"drafted": [K] * len(accepted), "accepted": accepted, "emitted": emitted, "miss": miss}
    return {"id": "a", "category": "c", "prompt_tokens": 1, "tokens": tokens} | steps


def test_steps_after_the_texts_part_are_left_out():
    ours = [chain([1, 2, 3, 4, 5, 6, 7], [1, 0, 2])]  # steps end after tokens 3, 4 and 7
    theirs = [chain([1, 2, 3, 4, 5, 9, 9, 9, 9], [0, 2, 3])]  # after 2, 5 and 9; the texts part after 5
    a, b = served.shared(ours, theirs)
    assert (a[0]["accepted"], a[0]["tokens"]) == ([1, 0], [1, 2, 3, 4])
    assert (b[0]["accepted"], b[0]["tokens"]) == ([0, 2], [1, 2, 3, 4, 5])
    first = served.positions(ours, theirs)[0]
    assert (first["ours same text"], first["vllm same text"]) == (0.5, 0.5)  # one of two steps each
    assert (first["ours"], first["vllm"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    none = served.positions([chain([1, 2], [0])], [chain([3, 2], [0])])[0]  # prefill's token differs already
    assert none["difference same text"] is None and none["difference"] == 0.0


def test_positions_are_accepted_by_drafted(live):
    found, ids, records, inside = live
    rows = [as_vllm(r) for r in records]
    counted = totals(rows)
    made = served.records(found, ids, {"rows": rows, "counters": counted}, inside)
    for row, accepted in zip(served.positions(records, made), counted["num_accepted_tokens_per_pos"], strict=True):
        assert row["vllm"] == pytest.approx(accepted / counted["num_drafts"][0])


def test_a_counter_that_counts_something_else_is_refused(live):
    found, ids, records, inside = live
    rows = [as_vllm(r) for r in records]
    for name in totals(rows):
        wrong = totals(rows)
        wrong[name][-1] += 1
        with pytest.raises(EngineError, match=name):
            served.records(found, ids, {"rows": rows, "counters": wrong}, inside)


def test_steps_that_cannot_have_given_the_tokens_are_refused(live):
    found, ids, records, inside = live
    rows = [as_vllm(r) for r in records]
    rows[2] = rows[2] | {"accepted": rows[2]["accepted"][:-1], "drafted": rows[2]["drafted"][:-1]}
    with pytest.raises(EngineError, match=found[2].id):
        served.records(found, ids, {"rows": rows, "counters": totals(rows)}, inside)


# --- the other Python --------------------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A stand-in for vLLM's environment: a Python that can import `vllm`, and a script made of the lines given."""

    def make(lines):
        (tmp_path / "vllm.py").write_text("")
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        script = tmp_path / "script.py"
        script.write_text(lines)
        monkeypatch.setattr(launcher, "SCRIPT", script)
        return python

    return make


ECHO = """
import argparse, json, os, sys
p = argparse.ArgumentParser()
for name in ("model", "prompts", "max-tokens", "dtype", "batch-rows", "draft", "k"):
    p.add_argument("--" + name)
p.add_argument("--end-ids", nargs="*")
p.add_argument("--end-with-parent", action="store_true")
a = p.parse_args()
prompts = json.load(open(a.prompts))
rows = [{"tokens": ids[: int(a.max_tokens)]} for ids in prompts] if int(a.batch_rows) else []
seen = {k: v for k, v in vars(a).items() if k not in ("prompts", "end_with_parent")} | {"virtual": os.environ.get("VIRTUAL_ENV")}
print(json.dumps({"rows": rows, "seen": seen}), flush=True)
for line in sys.stdin:
    if prompts[int(line)] == [13]:
        sys.exit("no thirteen")
    print(json.dumps({"tokens": len(prompts[int(line)]), "seconds": 0.5}), flush=True)
"""


def test_the_script_is_given_what_was_asked_for(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", "ours")
    options = {"max_tokens": 2, "end_ids": {7, 2}, "batch_rows": 5, "dtype": "float32", "python": engine(ECHO)}
    with launcher.engine(tmp_path, [[1, 2, 3], [4]], draft_folder=tmp_path / "d", k=3, **options) as made:
        assert [row["tokens"] for row in made.result["rows"]] == [[1, 2], [4]]
        expected = {"model": str(tmp_path), "draft": str(tmp_path / "d"), "k": "3", "max_tokens": "2", "dtype": "float32", "virtual": None}
        assert made.result["seen"] == expected | {"batch_rows": "5", "end_ids": ["2", "7"]}
        assert [made.one(i)["tokens"] for i in (1, 0)] == [1, 3]
    with launcher.engine(tmp_path, [[1]], **options) as made:
        assert made.result["seen"]["draft"] is None


def test_without_an_environment_the_command_that_builds_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(launcher.PYTHON, str(tmp_path / "nowhere"))
    with pytest.raises(MissingInput, match="make served-test"):
        launcher.interpreter()
    with pytest.raises(MissingInput, match="this Python has no vLLM"):
        launcher.interpreter(sys.executable)


def opened(python, folder, prompts):
    with launcher.engine(folder, prompts, max_tokens=4, python=python) as made:
        return made.one(0)


def test_an_unanswered_prompt_is_no_result(engine, tmp_path):
    with pytest.raises(EngineError, match="answered 1 of 2 prompts"):
        opened(engine(ECHO), tmp_path, [[1], []])


def test_a_crash_is_told_with_its_last_lines(engine, tmp_path):
    python = engine("import sys\nprint('loading', file=sys.stderr)\nsys.exit('KeyError: layers.0.self_attn')")
    with pytest.raises(EngineError, match=r"(?s)exit code 1.*KeyError: layers\.0\.self_attn"):
        opened(python, tmp_path, [[1]])
    with pytest.raises(EngineError, match="no thirteen"):
        opened(engine(ECHO), tmp_path, [[13]])


def test_what_hangs_is_ended_with_its_children(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "PATIENCE", 3)
    lines = "import subprocess, sys, time\nchild = subprocess.Popen(['sleep', '60'])\n"
    lines += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\ntime.sleep(60)"
    with pytest.raises(EngineError, match="no answer within 0.05 minutes"):
        opened(engine(lines), tmp_path, [[1]])
    stat_file = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    for _ in range(50):
        if not stat_file.exists() or stat_file.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


# --- verdicts ----------------------------------------------------------------------------------------------------


def result(same=0.0, whole=0.0, different=0, prompts=64, formats=0.0):
    row = {"position": 1}
    for suffix, difference in (("", whole), (served.INSIDE, 0.0), (served.SAME, same)):
        row |= {f"ours{suffix}": 0.5, f"vllm{suffix}": 0.5 + (difference or 0.0), f"difference{suffix}": difference}
    length = {"value": 1.5}
    return {
        "positions": [row],
        "texts": {"identical": prompts - different, "ties": 0, "different": different},
        "prompts": prompts,
        "k": 3,
        "speed": {"prompts": 2, "tokens_per_second_with_draft": 40.0, "tokens_per_second_plain": 25.0, "speedup": 1.6},
        "accept_length": {"ours": length, "vllm": length},
        "formats_largest_difference": formats,
    }


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, [True, True, True, True, True]),
        ({"same": -0.031, "whole": -0.029}, [False, True, True, True, True]),
        ({"same": 0.029, "whole": 0.031}, [True, None, True, True, True]),
        ({"same": None}, [None, True, True, True, True]),
        ({"different": 1}, [True, True, False, True, True]),
        ({"formats": 0.011}, [True, True, True, False, True]),
        ({"prompts": 59}, [True, True, True, True, None]),
    ],
)
def test_each_gate_fails_for_its_own_reason(changes, verdicts):
    found = result(**changes)
    assert [check[1] for check in served.checks(found)] == verdicts
    lines = []
    assert served.verdict(found, lines.append) == (False in verdicts)
    assert sum(line.startswith("FAILED") for line in lines) == verdicts.count(False)
    assert ("—" in served.table(found)) == (changes.get("same", 0.0) is None)


class Clocked:
    """An engine that answers with known times, and notes in `order` when it was asked."""

    def __init__(self, name, seconds, order):
        self.name, self.seconds, self.order = name, seconds, order

    def one(self, i):
        self.order.append((self.name, i))
        return {"tokens": 11, "seconds": self.seconds}


def test_speed_is_measured_in_turns_and_leaves_the_first_token_out():
    order = []
    fast = served.speed(Clocked("draft", 0.2, order), Clocked("plain", 0.4, order), 2, 3)
    assert (fast["tokens_per_second_with_draft"], fast["tokens_per_second_plain"], fast["speedup"]) == (50.0, 25.0, 2.0)
    assert order[2:] == [("draft", 0), ("plain", 0), ("draft", 1), ("plain", 1)]
    assert "1.60 times" in served.table(result())


# --- the real engine ---------------------------------------------------------------------------------------------


def small_draft(model, found, parameters, folder):
    """A draft trained for a minute on the verifier's own answers to these prompts: it accepts well there, and only there."""
    ids = evaluation.first_turns(model, found, parameters.evaluation_max_tokens, parameters.max_sequence_tokens)
    answers = speculative.decode(model, ids, max_tokens=parameters.evaluation_max_tokens, batch_rows=parameters.evaluation_batch_rows)
    rows = [from_turns(model.tokenizer, [(p, a)]) for p, a in zip(ids, answers.tokens, strict=True)]
    layers = verifier.layer_ids(model.config, [])
    extraction.save_dataset(rows, folder / "rows")
    extraction.extract(model, rows, folder / "rows", layers, batch_tokens=parameters.extraction_batch_tokens)
    counts = vocab.token_counts([(r.input_ids, r.loss_mask) for r in rows], model.config.vocab_size)
    words = vocab.build(counts, parameters.draft_vocab_size, model.config.vocab_size)
    proposal, _ = draft.propose(model.config, parameters, layers)
    built = draft.build(draft.speculator_config(proposal, model.folder, "sdpa"), words.d2t, words.t2d).train()
    loaders = []
    for split in ("train", "val"):
        data = training.dataset(folder / "rows", parameters, split)
        loaders.append(training.loader(data, parameters, model.config.hidden_size, train=split == "train"))
    training.make_trainer(built, parameters, *loaders, folder, attention="ttt", device=torch.device("cpu")).run_training()
    # the last epoch, not the best on held-out rows: here it is to know its prompts by heart
    last = folder / "checkpoints" / str(parameters.train_epochs - 1)
    draft.save(draft.load(last, model.folder, attention="sdpa", dtype=model.dtype), folder / "draft", attention="sdpa")
    return folder / "draft"


@pytest.mark.served
def test_vllm_accepts_what_we_accept(tmp_path, capsys):
    """The default run's draft where there is one, else a small one, on 64 prompts; the table goes to the terminal."""
    parameters = params.load(ROOT / "papermill_params" / "smollm2.yaml")
    with capsys.disabled():
        environment.quiet()
        if manifest.state(STAGES[3], parameters)[0] == "fresh":
            result = served.of_run(parameters)
        else:
            parameters = parameters.model_copy(update=SMALL)
            model = verifier.load(parameters.verifier, dtype=parameters.verifier_dtype)
            found = evaluation.prompts(parameters.prompts_evaluation, parameters.evaluation_prompts)
            best = small_draft(model, found, parameters, tmp_path)
            result = served.measure(model, best, found, parameters)
            files.write_json(ROOT / "build" / "served.json", result)
        print(served.table(result))
        assert served.verdict(result) == 0
    assert all(passed for _, passed, *_ in served.checks(result)[2:])
    assert result["positions"][2]["ours same text"] > 0.01, "a draft that never gets to the third position tests too little"
    assert result["speed"]["tokens_per_second_plain"] > 0


def test_the_page_asks_whether_vllm_is_there_and_goes_on_without(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_VLLM_PYTHON", str(tmp_path / "none"))
    assert not served.there()
    (tmp_path / "python").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("WORKBOOK_VLLM_PYTHON", str(tmp_path / "python"))
    assert served.there()
