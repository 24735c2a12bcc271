"""The library's `Trainer` on this machine: it learns, resumes exactly, keeps the best, and stops at damage by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import draft, extraction, params, training, ttt, vocab
from helpers.conversations import from_turns
from helpers.errors import DamagedInput, DataError, WorkbookError
from helpers.verifier import load

CPU = torch.device("cpu")
LAYERS = [2, 4, 5]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A stored dataset of twelve rows on the tiny verifier, in float32."""
    folder = tmp_path_factory.mktemp("data")
    verifier = load("tiny", dtype="float32")
    torch.manual_seed(0)
    rows = [
        from_turns(verifier.tokenizer, [(torch.randint(3, 500, (8,)).tolist(), torch.randint(3, 60, (24,)).tolist())]) for _ in range(12)
    ]
    extraction.save_dataset(rows, folder)
    extraction.extract(verifier, rows, folder, LAYERS, batch_tokens=256, report=lambda _: None)
    return folder, rows


def settings(**changes):
    base = {"verifier": "tiny", "verifier_dtype": "float32", "draft_vocab_size": 64, "train_batch_tokens": 64, "max_sequence_tokens": 64}
    base |= {"answer_max_tokens": 24, "heldout_share": 0.25, "train_epochs": 2, "train_learning_rate": 3e-3}
    return params.Parameters(**(base | changes))


def model_for(made, tiny_folder, parameters):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_folder)
    words = vocab.build(vocab.token_counts([(r.input_ids, r.loss_mask) for r in made[1]], 512), parameters.draft_vocab_size, 512)
    proposal, _ = draft.propose(config, parameters, LAYERS)
    return draft.build(draft.speculator_config(proposal, tiny_folder, "sdpa"), words.d2t, words.t2d, seed=parameters.seed).train()


def trainer_for(made, tiny_folder, folder, data=None, report=lambda _: None, attention="ttt", **changes):
    parameters = settings(**changes)
    loaders = [
        training.loader(training.dataset(data or made[0], parameters, split), parameters, 64, train=split == "train")
        for split in ("train", "val")
    ]
    return training.make_trainer(
        model_for(made, tiny_folder, parameters), parameters, *loaders, folder, attention=attention, device=CPU, report=report
    )


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


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
    parameters = settings(noise_std=0.5)
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
        training.shim(CPU)
