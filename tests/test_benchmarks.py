"""What the benchmarks count, compare and keep; the figures themselves are `make bench`'s."""

import copy
import platform
import sys

import pytest
import torch
from speculators.losses import resolve_loss_config
from torch.utils.flop_counter import FlopCounterMode

from helpers import ttt
from helpers.errors import ParameterError
from helpers.params import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import concatenated  # noqa: E402
import lines  # noqa: E402
import operations  # noqa: E402
import run  # noqa: E402
import training  # noqa: E402

SMALL = operations.Shape(hidden=24, states=3, heads=6, kv_heads=2, head_dim=4, mlp=40, vocabulary=32)
ROW = training.Row(documents=2, tokens=13, prompt=5, faster=1, smaller=1, eager=True)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(training, "SHAPE", SMALL)
    monkeypatch.setattr(training, "FULL_VOCABULARY", 64)
    return training.draft()


def float_row():
    batch = training.packed(ROW)
    return {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}


# --- lines -------------------------------------------------------------------------------------------------------


def test_a_ratio_is_of_medians_and_its_spread_of_rounds():
    line = lines.compared("b", "x", "tokens/s", [10, 30, 20], [10, 10, 5], against="y", aim=">= 2")
    assert (line.ours, line.other, line.ratio) == (20, 10, 2.0)
    assert line.spread == (1.0, 4.0) and line.n == 3 and line.reached
    with pytest.raises(ValueError, match="3 rounds"):
        lines.compared("b", "x", "s", [1, 2, 3], [1], against="y")


@pytest.mark.parametrize("ratio, aim, reached", [(2.49, ">= 2.5", False), (0.4, "<= 0.4", True), (0.41, "<= 0.4", False), (9, "", None)])
def test_an_aim_has_a_direction(ratio, aim, reached):
    assert lines.compared("b", "x", "MB", [ratio], [1], against="y", aim=aim).reached is reached


def test_the_table_has_a_row_for_each_line_and_says_what_was_missed():
    found = [lines.compared("b", name, "MB", [a], [2], against="other", aim="<= 0.4") for name, a in (("large", 1.0), ("little", 0.5))]
    head, _, large, little = lines.table(found).splitlines()
    assert head.split()[:5] == ["benchmark", "what", "ours", "other", "unit"]
    assert large.endswith("missed") and "0.50" in large and little.endswith("reached") and "0.25" in little


def test_results_are_kept_and_only_what_was_measured_again_changes(tmp_path):
    path = tmp_path / "results.json"
    lines.keep(path, [lines.compared(*at, "s", [1], [2], against="y") for at in (("b", "x"), ("b", "z"), ("a", "x"))])
    lines.keep(path, [lines.compared("b", "x", "s", [3], [2], against="y")])
    assert [(line.benchmark, line.name, line.ratio) for line in lines.read(path)] == [("a", "x", 0.5), ("b", "z", 0.5), ("b", "x", 1.5)]


def test_the_machine_is_told_without_its_name():
    found = lines.machine()
    assert "cores" in found and f"torch {torch.__version__}" in found
    assert platform.node() not in found and str(ROOT) not in found


# --- the runner --------------------------------------------------------------------------------------------------


def test_a_benchmark_is_a_module_that_measures(tmp_path):
    (tmp_path / "one.py").write_text("def measure(part, report):\n    return []\n")
    (tmp_path / "shared.py").write_text("def helper():\n    measure = 1\n")
    assert run.benchmarks(tmp_path) == ["one"]
    assert "training" in run.benchmarks() and "lines" not in run.benchmarks()


def test_only_names_what_is_there():
    assert run.chosen([], ["a", "b"]) == ["a", "b"]
    assert run.chosen(["b:part"], ["a", "b"]) == ["b:part"]
    with pytest.raises(ParameterError, match="no benchmark c"):
        run.chosen(["c"], ["a", "b"])


# --- counting ----------------------------------------------------------------------------------------------------


def test_counted_products_are_those_the_step_performs(small):
    batch = float_row()
    with FlopCounterMode(display=False) as counter:
        ttt.forward(small, **batch, ttt_steps=3)[1].backward()
    counts = counter.get_flop_counts()["Global"]
    performed = sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    plan = ttt.plan(batch["document_ids"][0], batch["loss_mask"][0], 3)
    found = operations.products(plan, 26, int(batch["loss_mask"].sum()), SMALL)
    assert operations.total(found) == performed


def test_attention_is_counted_by_the_pairs_it_sees():
    # one document of 5 tokens, the last 3 supervised: with one step starts 2, 3, 4 see 3, 4 and 5 keys
    plan = ttt.plan(torch.zeros(5, dtype=torch.long), torch.tensor([0, 0, 1, 1, 1]), 1)
    assert operations.total(operations.attention(plan, SMALL)) == (3 + 4 + 5) * 6 * 4 * 2 * 7


def test_products_are_run_alone_as_often_as_they_are_counted():
    found = [operations.Product("x", 5, 3, 4, 2, stored) for stored in ("nt", "nn", "tn", "tn")]
    with FlopCounterMode(display=False) as counter:
        training.multiplier(found)()
    assert counter.get_total_flops() == operations.total(found) == 4 * 2 * 2 * 5 * 3 * 4


def test_rows_hold_the_same_documents():
    batch = training.packed(ROW)
    rows = training.as_rows(batch, ROW)
    assert rows["hidden_states"].shape == (2, 13, 3 * 576) and torch.equal(rows["input_ids"].flatten(), batch["input_ids"][0])
    assert rows["loss_mask"].sum(1).tolist() == [8, 8]


# --- what is compared does the same work ---------------------------------------------------------------------------


def test_the_concatenating_form_has_the_librarys_gradients(small):
    batch, other = float_row(), copy.deepcopy(small)
    small(**batch, ttt_steps=3, loss_config=resolve_loss_config("kl_div", "eager"))[1].backward()
    concatenated.loss(other, training.as_rows(batch, ROW), 3).backward()
    gradients = {n: p.grad for n, p in small.named_parameters() if p.requires_grad}
    assert len(gradients) > 8
    for name, p in other.named_parameters():
        if p.requires_grad:
            assert (p.grad - gradients[name]).norm() < 1e-4 * gradients[name].norm(), name


def test_a_row_is_timed_in_turns_and_told_against_each(small, monkeypatch):
    said = []
    monkeypatch.setattr(training, "ROUNDS", 2)
    found = training.timed("2x13", ROW, small, said.append)
    assert [line.against for line in found] == ["library sdpa", "concatenating eager", "products alone"]
    assert all(line.n == 2 and line.ours > 0 and line.spread[0] <= line.spread[1] for line in found)
    assert len(said) == 2 and "products" in said[0]


def test_memory_is_read_in_a_process_of_its_own(small, monkeypatch):
    def draft():
        torch.set_num_threads(1)  # this process may have started threads, which do not survive the fork
        return small

    monkeypatch.setattr(training, "draft", draft)
    assert 0 < training.memory("ours", ROW) < 500
