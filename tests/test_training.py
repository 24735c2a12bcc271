"""The library's `Trainer` on this machine: it learns, resumes exactly, keeps the best, and stops at damage by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_rows import CPU, settings, store, trainer_for, weights
from transformers import AutoConfig

from helpers import curves, draft, extraction, forecast, library_shim, training, ttt
from helpers.errors import DamagedInput, DataError, WorkbookError
from helpers.verifier import load


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A stored dataset of twelve rows on the tiny verifier, in float32."""
    folder = tmp_path_factory.mktemp("data")
    return folder, store(load("tiny", dtype="float32"), folder)


def copy_of(folder, target):
    import shutil

    return shutil.copytree(folder, target)


def test_training_lowers_the_loss_and_moves_the_norms(made, tiny_folder, tmp_path):
    trainer = trainer_for(made, tiny_folder, tmp_path, train_epochs=6)
    before = weights(trainer)
    trainer.run_training()
    losses = [r["loss"] for r in trainer.curve]
    assert losses[-1] < losses[0]
    assert (trainer.model.norm.weight - before["norm.weight"]).abs().max() > 1e-4
    assert trainer.curve[-1]["heldout_accept_length"] >= 1.0
    assert {"loss_0", "full_acc_2", "learning_rate", "tokens_per_second"} <= set(trainer.curve[0])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interrupted_and_resumed_equals_uninterrupted_exactly(made, tiny_folder, tmp_path, optimizer):
    whole = trainer_for(made, tiny_folder, tmp_path / "a", train_epochs=3, train_optimizer=optimizer, noise_std=0.1)
    whole.run_training()
    first = trainer_for(made, tiny_folder, tmp_path / "b", train_epochs=3, train_optimizer=optimizer, noise_std=0.1)
    stop = first.train_epoch

    def once(epoch, **kwargs):
        if epoch == 2:
            raise KeyboardInterrupt
        stop(epoch, **kwargs)

    first.train_epoch = once
    with pytest.raises(KeyboardInterrupt):
        first.run_training()
    torch.manual_seed(99)  # another process starts from another random state
    second = trainer_for(made, tiny_folder, tmp_path / "b", train_epochs=3, train_optimizer=optimizer, noise_std=0.1)
    assert second.current_epoch == 2
    second.run_training()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name
    assert [r["loss"] for r in whole.curve] == [r["loss"] for r in second.curve]
    assert (whole.best, whole.best_epoch) == (second.best, second.best_epoch)


def test_a_half_written_checkpoint_is_passed_over(made, tiny_folder, tmp_path):
    trainer_for(made, tiny_folder, tmp_path).run_training()
    half = tmp_path / "checkpoints" / "7"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"cut off")
    assert trainer_for(made, tiny_folder, tmp_path).checkpointer.previous_epoch == 1


def test_a_finished_run_is_not_trained_again(made, tiny_folder, tmp_path):
    trainer_for(made, tiny_folder, tmp_path).run_training()
    again = trainer_for(made, tiny_folder, tmp_path)
    steps = len(again.curve)
    again.run_training()
    assert steps and len(again.curve) == steps


def test_the_kept_draft_is_the_one_with_the_longest_predicted_accept_length(made, tiny_folder, tmp_path):
    trainer = trainer_for(made, tiny_folder, tmp_path, train_epochs=3)
    lengths = iter([1.5, 1.9, 1.2])
    measure = trainer.val_epoch

    def judged(epoch):
        found = measure(epoch)
        found["predicted_accept_length"] = next(lengths)
        return found

    trainer.val_epoch = judged
    trainer.run_training()
    facts = json.loads((tmp_path / "best" / draft.SIDE_FILE).read_text())
    assert facts["facts"]["epoch"] == 1 and facts["attention"] == "ttt"
    kept = draft.load(tmp_path / "best", tiny_folder)
    assert kept._attn_impl == "sdpa"  # the library alone would fall back to flex attention
    assert not torch.equal(kept.fc.weight, trainer.model.fc.weight.to(torch.bfloat16).float())


def test_a_nan_in_a_stored_row_stops_the_run_and_names_the_file(made, tiny_folder, tmp_path):
    data = copy_of(made[0], tmp_path / "data")
    path = extraction.shard(data, 3)
    tensors = load_file(path)
    tensors["hidden_states"][2, 1, 5] = float("nan")
    save_file(tensors, path)
    with pytest.raises(DamagedInput, match="NaN") as caught:
        trainer_for(made, tiny_folder, tmp_path / "run", data=data).run_training()
    assert "hs_3.safetensors" in caught.value.where


@pytest.mark.parametrize("prompts", [True, False])
def test_prompt_positions_are_supervised_in_training_alone(made, prompts):
    parameters = settings(train_on_prompts=prompts)
    masks = {}
    for split in ("train", "val"):
        batch = next(iter(training.loader(training.dataset(made[0], parameters, split), parameters, 64, train=split == "train")))
        masks[split] = batch["loss_mask"][0][(batch["document_ids"] == 0)[0]].bool()
    assert masks["train"].tolist() == [prompts] * 7 + [True] * 24  # eight prompt tokens, shifted by one
    assert masks["val"].tolist() == [False] * 7 + [True] * 24


def test_a_signal_that_comes_while_a_row_is_read_is_not_called_damage(made, monkeypatch):
    from speculators.train.data import ArrowDataset
    from speculators.train.graceful_shutdown import TrainingInterruptedError

    def interrupted(self, index):
        raise TrainingInterruptedError("SIGTERM")

    monkeypatch.setattr(ArrowDataset, "_get_raw_data", interrupted)
    with pytest.raises(TrainingInterruptedError):
        training.dataset(made[0], settings(), "train")[0]


@pytest.mark.parametrize("damage", ["truncated", "other tokens", "missing"])
def test_a_damaged_row_stops_the_run_and_names_the_file(made, tiny_folder, tmp_path, damage):
    data = copy_of(made[0], tmp_path / "data")
    path = extraction.shard(data, 2)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "missing":
        path.unlink()
    else:
        save_file(load_file(path) | {"token_ids": load_file(path)["token_ids"] + 1}, path)
    with pytest.raises(DamagedInput) as caught:
        trainer_for(made, tiny_folder, tmp_path / "run", data=data).run_training()
    assert "hs_2.safetensors" in caught.value.where


def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_spoilt(made, tiny_folder, tmp_path):
    trainer = trainer_for(made, tiny_folder, tmp_path)
    before = weights(trainer)
    trainer.model.fc.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(DataError, match="not finite"):
        trainer.run_training()
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())


def test_a_row_longer_than_a_batch_is_refused(made):
    parameters = settings().model_copy(update={"train_batch_tokens": 20})
    with pytest.raises(DataError, match="does not fit"):
        training.loader(training.dataset(made[0], parameters, "train"), parameters, 64, train=True)


def test_noise_has_the_asked_deviation_and_touches_training_rows_only(made):
    parameters = settings(noise_std=0.5, train_on_prompts=False)
    data = training.dataset(made[0], parameters, "train")
    torch.manual_seed(0)
    noisy, clean = (training.loader(data, parameters, 64, train=t).collate_fn([data[0]]) for t in (True, False))
    difference = (noisy["hidden_states"] - clean["hidden_states"])[0, :31]
    assert difference.std().item() == pytest.approx(0.5, rel=0.05)  # 31 x 192 draws: standard error 0.5 / sqrt(2 * 5952) = 0.0046
    for name in ("input_ids", "loss_mask", "verifier_last_hidden_states"):
        assert torch.equal(noisy[name], clean[name])


def test_the_librarys_own_step_trains_too(made, tiny_folder, tmp_path):
    trainer = trainer_for(made, tiny_folder, tmp_path, attention="sdpa", train_epochs=1)
    assert trainer.model.forward.__func__ is not ttt.forward
    trainer.run_training()
    assert json.loads((tmp_path / "best" / draft.SIDE_FILE).read_text())["attention"] == "sdpa"


def test_another_speculators_version_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.2.0")
    with pytest.raises(WorkbookError, match=r"1\.2\.0"):
        library_shim.shim(CPU)


def test_a_frozen_head_stays_a_trained_one_moves_and_is_reloaded_and_gone_on_from(made, tiny_folder, tmp_path):
    frozen = trainer_for(made, tiny_folder, tmp_path / "frozen")
    rows = frozen.model.lm_head.weight.clone()
    frozen.run_training()
    assert torch.equal(frozen.model.lm_head.weight, rows)
    trained = trainer_for(made, tiny_folder, tmp_path / "trained", train_head=True)
    trained.run_training()
    head = trained.model.lm_head.weight
    assert (head - rows).abs().max() > 1e-3
    assert torch.equal(trained.model.verifier_lm_head.weight, rows)  # the targets stay the verifier's
    kept = draft.load(tmp_path / "trained" / "best", tiny_folder)
    assert (kept.lm_head.weight - rows).abs().max() > 1e-3
    again = trainer_for(made, tiny_folder, tmp_path / "trained", train_head=True)
    assert torch.equal(again.model.lm_head.weight, head) and again.model.lm_head.weight.requires_grad


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_with_a_trained_head_and_the_papers_settings_is_exact(made, tiny_folder, tmp_path, optimizer):
    changes = {"train_epochs": 2, "train_head": True, "train_betas": [0.9, 0.95], "train_clip": 0.5, "train_optimizer": optimizer}
    whole = trainer_for(made, tiny_folder, tmp_path / "a", **changes)
    whole.run_training()
    first = trainer_for(made, tiny_folder, tmp_path / "b", **changes)
    train = first.train_epoch
    first.train_epoch = lambda epoch, **more: train(epoch, **more) if epoch < 1 else (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        first.run_training()
    second = trainer_for(made, tiny_folder, tmp_path / "b", **changes)
    second.run_training()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_betas_arrive_in_the_optimiser_and_stay_after_resuming(made, tiny_folder, tmp_path, optimizer):
    changes = {"train_optimizer": optimizer, "train_betas": [0.8, 0.95], "train_epochs": 1}
    for _ in range(2):
        trainer = trainer_for(made, tiny_folder, tmp_path, **changes)
        adamw = [o for o in trainer.optimizers if isinstance(o, torch.optim.AdamW)]
        assert [g["betas"] for o in adamw for g in o.param_groups] == [(0.8, 0.95)]
        trainer.run_training()
    plain = trainer_for(made, tiny_folder, tmp_path / "plain", train_optimizer=optimizer)
    assert {g["betas"] for o in plain.optimizers if isinstance(o, torch.optim.AdamW) for g in o.param_groups} == {(0.9, 0.999)}


@pytest.mark.parametrize(("clip", "norm"), [(1.0, 1.0), (0.25, 0.25)])
def test_gradients_are_cut_to_the_asked_norm_before_the_optimiser_sees_them(made, tiny_folder, tmp_path, clip, norm):
    trainer = trainer_for(made, tiny_folder, tmp_path, train_clip=clip, train_epochs=1)
    seen = []
    step = trainer.optimizers[0].step

    def watched(*more):
        seen.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None]).item())
        return step(*more)

    trainer.optimizers[0].step = watched
    trainer.model.fc.weight.register_hook(lambda grad: grad * 1e4)  # far above any clip
    trainer.run_training()
    assert seen and all(found == pytest.approx(norm, rel=1e-4) for found in seen)


def test_muon_and_adamw_decay_by_their_own_parameters(made, tiny_folder, tmp_path):
    trainer = trainer_for(made, tiny_folder, tmp_path, train_optimizer="muon", train_weight_decay=0.02, train_muon_weight_decay=0.1)
    assert {type(o).__name__: o.param_groups[0]["weight_decay"] for o in trainer.optimizers} == {"Muon": 0.1, "AdamW": 0.02}


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_a_sliding_window_and_norms_for_each_state_train_and_survive_reload(made, tiny_folder, tmp_path, layer_type):
    changes = {"draft_window": 6, "fc_norm": True, "draft_layer_type": layer_type, "train_epochs": 1}
    trainer = trainer_for(made, tiny_folder, tmp_path, **changes)
    trainer.run_training()
    kept = draft.load(tmp_path / "best", tiny_folder)
    assert (kept.sliding_window, kept.sliding_window_indices, len(kept.fc_norm)) == (6, [0], 3)
    assert (kept.fc_norm[2].weight - 1.0).abs().max() > 0


def test_the_norm_check_reads_the_float32_weights_that_were_trained(made, tiny_folder, tmp_path):
    trainer = trainer_for(made, tiny_folder, tmp_path, train_epochs=2)
    trainer.run_training()
    verdict = {name: passed for name, passed, *_ in curves.checks(trainer, [])}
    assert verdict["norm weights moved"]
    with torch.no_grad():
        trainer.model.norm.weight.copy_(trainer.norm_at_start)  # what training in pure bfloat16 leaves behind
    assert not {name: passed for name, passed, *_ in curves.checks(trainer, [])}["norm weights moved"]


def test_what_a_kill_left_half_written_is_cleared_away(made, tiny_folder, tmp_path):
    half = tmp_path / "checkpoints" / ".4711.0"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"cut off")
    trainer_for(made, tiny_folder, tmp_path).run_training()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_forecast_counts_the_steps_to_come_and_moves_nothing(made, tiny_folder, tmp_path, optimizer):
    chosen = {"train_optimizer": optimizer, "train_epochs": 1, "train_on_prompts": optimizer == "muon"}
    trainer = trainer_for(made, tiny_folder, tmp_path, **chosen)
    before, parameters = weights(trainer), settings(**chosen)
    proposal, _ = draft.propose(AutoConfig.from_pretrained(tiny_folder), parameters, [2, 4, 5])
    plan = forecast.expect(trainer, parameters, proposal)
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    assert all(not o.state for o in trainer.optimizers) and trainer.global_step == 0
    # a batch holds two rows of 8 + 24 tokens: all but the first, or 24 and the two before, whose later steps reach them
    assert plan["supervised starts in the fullest batch"] == 2 * (31 if parameters.train_on_prompts else 26)
    assert plan["tokens per epoch"] == 9 * 32 and 0 < plan["of it optimiser"] < plan["seconds per step"]
    trainer.run_training()
    assert plan["steps"] == len(trainer.curve)


def test_a_run_that_memory_cannot_hold_is_refused_before_the_probe(made, tiny_folder, tmp_path, monkeypatch):
    trainer = trainer_for(made, tiny_folder, tmp_path)
    proposal, _ = draft.propose(AutoConfig.from_pretrained(tiny_folder), settings(), [2, 4, 5])
    monkeypatch.setattr("helpers.step_memory.available", lambda _: 1000.0)
    monkeypatch.setattr(forecast, "_probe", lambda *_: pytest.fail("the probe would be what runs out of memory"))
    with pytest.raises(WorkbookError, match="training needs about"):
        forecast.expect(trainer, settings(), proposal)
