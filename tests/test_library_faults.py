"""Faults of speculators 0.9.0 that would reach our users: each happens with the bare library here, and not through our trainer.

The first half of each test fails when the library mends the fault, which is the time to drop what works around it.
"""

import argparse
import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_rows import CPU, model_for, settings, store, trainer_for

from helpers import extraction, library_shim, training, vocab
from helpers.errors import DamagedInput, DataError, MissingInput
from helpers.verifier import load


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, store(load("tiny", dtype="float32"), folder)


def bare_loader(data, split, tokens=64):
    from hs_connectors import FileTransfer
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    transfer = FileTransfer(data / "hidden_states")
    rows = ArrowDataset(tokens, data, transfer, on_missing="raise", train_ratio=0.75, split=split, hidden_states_dtype=torch.float32)
    sampler = MultipackDistributedBatchSamplerV2(tokens, rows.approx_lengths, 1, 0)
    collate = CollateFn(tokens, 64, dtype=torch.float32, preprocess=shift_batch)
    return torch.utils.data.DataLoader(rows, batch_sampler=sampler, collate_fn=collate)


def bare(made, tiny_folder, folder, data=None, **changes):
    """The library's own Trainer, dataset, step and checkpointer; only the device is replaced, without which nothing runs here."""
    library_shim.shim(CPU)
    from speculators.train import trainer as library

    class OnCpu(library.Trainer):
        def setup_model(self):
            self.device_type = "cpu"
            super().setup_model()

    steps = training.step_arguments(settings())
    common = {"lr": 3e-3, "num_epochs": 2, "save_path": str(folder), "hidden_states_dtype": torch.float32}
    config = library.TrainerConfig(**common | {"train_call_kwargs": steps, "val_call_kwargs": steps} | changes)
    model = model_for(made[1], tiny_folder, settings())
    return OnCpu(model, config, *(bare_loader(data or made[0], split) for split in ("train", "val")))


def trained(trainer):
    return [p for p in trainer.model.parameters() if p.requires_grad]


def damaged(made, tmp_path, change):
    """A copy of the stored rows in which the tensors of row 3 are changed."""
    data = shutil.copytree(made[0], tmp_path / "data")
    path = extraction.shard(data, 3)
    save_file(change(load_file(path)), path)
    return data


def test_a_nan_in_a_stored_row(made, tiny_folder, tmp_path):
    def change(tensors):
        tensors["hidden_states"][2, 1, 5] = float("nan")
        return tensors

    data = damaged(made, tmp_path, change)
    library = bare(made, tiny_folder, tmp_path / "bare", data=data)
    library.run_training()  # ends as if all were well
    assert all(p.isnan().all() for p in trained(library)) and (tmp_path / "bare" / "checkpoint_best").is_symlink()
    with pytest.raises(DamagedInput, match="NaN"):
        trainer_for(made, tiny_folder, tmp_path / "ours", data=data).run_training()


def test_a_gradient_that_is_not_finite(made, tiny_folder, tmp_path):
    library = bare(made, tiny_folder, tmp_path / "bare", num_epochs=1)
    library.model.fc.weight.register_hook(lambda grad: grad * float("inf"))
    library.run_training()
    assert all(p.isnan().any() for p in trained(library))
    ours = trainer_for(made, tiny_folder, tmp_path / "ours")
    ours.model.fc.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(DataError, match="not finite"):
        ours.run_training()
    assert all(p.isfinite().all() for p in trained(ours))


@pytest.mark.parametrize("where", ["everywhere", "held out"])
def test_rows_without_a_supervised_token(made, tiny_folder, tmp_path, where):
    data = shutil.copytree(made[0], tmp_path / "data")
    first = 0 if where == "everywhere" else 9  # of twelve rows a quarter is held out
    rows = [r if i < first else dataclasses.replace(r, loss_mask=[0] * len(r.loss_mask)) for i, r in enumerate(made[1])]
    extraction.save_dataset(rows, data)
    library = bare(made, tiny_folder, tmp_path / "bare", data=data)
    library.run_training()
    assert library.best_val_loss == 0.0  # the best there can be, and kept
    with pytest.raises(DataError, match="no token of the .* conversations is supervised"):
        trainer_for(made, tiny_folder, tmp_path / "ours", data=data)


def test_a_shard_with_another_number_of_layers(made, tiny_folder, tmp_path):
    data = damaged(made, tmp_path, lambda t: t | {"hidden_states": t["hidden_states"][:, 1:].contiguous()})
    with pytest.raises(RuntimeError, match="must match"):  # two sizes, and no word of the row
        bare(made, tiny_folder, tmp_path / "bare", data=data).run_training()
    with pytest.raises(DamagedInput, match="2 layers beside the last, other rows 3") as caught:
        trainer_for(made, tiny_folder, tmp_path / "ours", data=data).run_training()
    assert "hs_3.safetensors" in caught.value.where


def test_rows_of_other_layers_than_the_draft_reads(made, tiny_folder, tmp_path):
    model = model_for(made[1], tiny_folder, settings(), layers=[2, 4])
    with pytest.raises(DataError, match="3 layers of 64, the draft reads 2"):
        trainer_for(made, tiny_folder, tmp_path, model=model)


def test_the_last_epoch_is_saved_and_older_ones_are_not_kept(made, tiny_folder, tmp_path):
    bare(made, tiny_folder, tmp_path / "bare", num_epochs=4, checkpoint_freq=3).run_training()
    kept = {p.name for p in (tmp_path / "bare").iterdir() if p.name.isdigit()}
    assert "0" in kept and "3" not in kept  # the first always, the last not
    trainer_for(made, tiny_folder, tmp_path / "ours", train_epochs=4).run_training()
    assert [p.name for p in (tmp_path / "ours" / "checkpoints").iterdir()] == ["3"]


def test_a_run_cut_to_some_steps(made, tiny_folder, tmp_path):
    library = bare(made, tiny_folder, tmp_path / "bare", num_epochs=4, max_steps=2)
    library.run_training()
    assert library.global_step > 2 and (tmp_path / "bare" / "3").is_dir()  # the outer loop never hears of it
    ours = trainer_for(made, tiny_folder, tmp_path / "ours")
    assert ours.config.max_steps is None  # not offered: a shorter run is fewer epochs or prompts


def test_optimiser_state_keeps_its_precision(made, tiny_folder, tmp_path):
    def moments(path):
        found = torch.load(path / "optimizer_state_dict.pt", weights_only=True)
        groups = found if isinstance(found, list) else [found]
        return {s["exp_avg"].dtype for g in groups for s in g["state"].values()}

    bare(made, tiny_folder, tmp_path / "bare", num_epochs=1).run_training()
    trainer_for(made, tiny_folder, tmp_path / "ours", train_epochs=1, train_optimizer="adamw").run_training()
    assert moments(tmp_path / "bare" / "0") == {torch.bfloat16}
    assert moments(tmp_path / "ours" / "checkpoints" / "0") == {torch.float32}
    assert load_file(tmp_path / "bare" / "0" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert load_file(tmp_path / "ours" / "checkpoints" / "0" / "model.safetensors")["fc.weight"].dtype == torch.float32


def test_a_row_longer_than_a_batch(made):
    with pytest.warns(UserWarning, match="truncated"):
        assert max(bare_loader(made[0], "train", tokens=20).batch_sampler.lengths) == 20  # cut, and training goes on
    parameters = settings().model_copy(update={"train_batch_tokens": 20})
    with pytest.raises(DataError, match="does not fit"):
        training.loader(training.dataset(made[0], parameters, "train"), parameters, 64, train=True)


def test_a_draft_vocabulary_without_token_counts(tiny_folder, tmp_path):
    from speculators.train.cli import parse_vocab_mappings

    asked = {"d2t_path": None, "t2d_path": None, "data_path": tmp_path, "draft_vocab_size": 64, "token_freq_path": None}
    asked |= {"verifier_name_or_path": str(tiny_folder), "trust_remote_code": False}
    assert parse_vocab_mappings(argparse.Namespace(**asked)) == (None, None, 512)  # 64 asked for, all 512 given
    with pytest.raises(MissingInput, match="no token counts"):
        vocab.load_counts(tmp_path / "token_freq.pt", 512)
    with pytest.raises(MissingInput, match="no vocabulary map"):
        vocab.load(tmp_path, verifier="tiny", data="x")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_where_nothing_is_wrong_our_trainer_computes_what_the_library_computes_to_the_bit(made, tiny_folder, tmp_path, optimizer):
    rates = {"optimizer": optimizer, "lr": 3e-3, "muon_lr": 4e-3, "muon_weight_decay": 0.01, "scheduler_warmup_ratio": 0.02}
    library = bare(made, tiny_folder, tmp_path / "bare", **rates)
    library.run_training()
    same = {"train_optimizer": optimizer, "train_scheduler": "linear", "train_on_prompts": False}
    ours = trainer_for(made, tiny_folder, tmp_path / "ours", attention="sdpa", **same)
    ours.run_training()
    assert all(torch.equal(a, b) for a, b in zip(trained(library), trained(ours), strict=True))
