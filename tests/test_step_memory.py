"""Expected peak memory: the count of trained values is the model's, the sum is what a run takes, too much is refused by number."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from helpers import draft, params, step_memory
from helpers.errors import WorkbookError

CPU = torch.device("cpu")


def sizes_of(tiny_folder, starts=40, **changes):
    chosen = {"draft_vocab_size": 128, "train_batch_tokens": 1024} | changes
    parameters = params.Parameters(**chosen)
    proposal, _ = draft.propose(AutoConfig.from_pretrained(tiny_folder), parameters, [2, 4, 5])
    return step_memory.sizes(proposal, parameters, starts=starts)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("head", [False, True])
def test_counted_values_are_the_built_drafts(make_draft, tiny_folder, layers, head):
    model = make_draft(draft_layers=layers)
    model.lm_head.weight.requires_grad_(head)
    found = step_memory.parts(sizes_of(tiny_folder, draft_layers=layers, train_head=head))
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and p.ndim == 2)
    assert found["weights, trained"] == 4 * trained == found["gradients"]
    whole_head = 2 * 512 * 64  # the verifier's, in bfloat16
    assert found["weights, trained"] + found["weights, frozen"] == 4 * (total - norms) + whole_head


def test_more_tokens_steps_and_vocabulary_cost_more_and_adamw_twice_muon(tiny_folder):
    base = step_memory.peak(sizes_of(tiny_folder))
    assert all(
        step_memory.peak(sizes_of(tiny_folder, **changes)) > base
        for changes in (
            {"train_batch_tokens": 2048},
            {"train_ttt_steps": 5},
            {"draft_vocab_size": 256},
            {"starts": 80},
            {"train_head": True},
        )
    )
    muon, adamw = (step_memory.parts(sizes_of(tiny_folder, train_optimizer=o))["optimiser state"] for o in ("muon", "adamw"))
    assert adamw == 2 * muon


def test_a_run_that_cannot_fit_is_refused_with_both_numbers(monkeypatch):
    needed = step_memory.peak(step_memory.KIMI_K2_5)
    monkeypatch.setattr(step_memory, "available", lambda _: 8 * 2**30)
    with pytest.raises(WorkbookError) as caught:
        step_memory.require(step_memory.KIMI_K2_5, CPU)
    assert f"{needed / 2**30:.1f} GiB" in str(caught.value) and "8.0 GiB are free" in str(caught.value)
    assert step_memory.require(step_memory.KIMI_K2_5, CPU, held=needed - 2**30)["free"] == 8 * 2**30
    monkeypatch.undo()
    assert 0 < step_memory.available(CPU) < 2**50


def test_the_row_for_kimi_counts_its_embeddings_and_projection():
    found = step_memory.parts(step_memory.KIMI_K2_5)
    assert step_memory.matrices(step_memory.KIMI_K2_5)["fc"] == 3 * 7168**2
    # embeddings and two heads in float32, the whole head in bfloat16
    assert found["weights, frozen"] == 4 * 7168 * (163840 + 2 * 32000) + 2 * 7168 * 163840
    assert [r["part"] for r in step_memory.rows(step_memory.KIMI_K2_5)][-1] == "peak"


RUNS = [
    {"hidden": 512, "tokens": 2048, "vocabulary": 8192, "draft_vocabulary": 2048, "dtype": "float32", "optimizer": "adamw", "head": False},
    {"hidden": 640, "tokens": 1536, "vocabulary": 8192, "draft_vocabulary": 4096, "dtype": "bfloat16", "optimizer": "muon", "head": True},
]


@pytest.mark.slow
def test_measured_peak_lies_within_a_tenth_of_the_expected(tmp_path):
    """In a process of its own, with an allocator that gives freed memory back: what is left are tensors."""
    quiet = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("measure_step.py")), json.dumps(RUNS)]
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=600, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (measured, expected), run in zip(lines[1:], RUNS, strict=True):
        assert expected == pytest.approx(measured, rel=0.1), (run, measured / 1e6, expected / 1e6)
