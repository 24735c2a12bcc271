"""A stored dataset on the tiny verifier and trainers over it, shared by the tests of training."""

import torch

from helpers import draft, extraction, params, training, vocab
from helpers.conversations import from_turns

CPU = torch.device("cpu")
LAYERS = [2, 4, 5]


def store(verifier, folder, *, rows=12, layers=LAYERS):
    """Rows of 8 prompt and 24 answer tokens with the verifier's states, as notebook 01 stores them."""
    torch.manual_seed(0)
    made = [
        from_turns(verifier.tokenizer, [(torch.randint(3, 500, (8,)).tolist(), torch.randint(3, 60, (24,)).tolist())]) for _ in range(rows)
    ]
    extraction.save_dataset(made, folder)
    extraction.extract(verifier, made, folder, layers, batch_tokens=256, report=lambda _: None)
    return made


def settings(**changes):
    base = {"verifier": "tiny", "verifier_dtype": "float32", "draft_vocab_size": 64, "train_batch_tokens": 64, "max_sequence_tokens": 64}
    base |= {"answer_max_tokens": 24, "heldout_share": 0.25, "train_epochs": 2, "train_learning_rate": 3e-3}
    return params.Parameters(**(base | changes))


def model_for(rows, tiny_folder, parameters, layers=LAYERS):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_folder)
    words = vocab.build(vocab.token_counts([(r.input_ids, r.loss_mask) for r in rows], 512), parameters.draft_vocab_size, 512)
    proposal, _ = draft.propose(config, parameters, layers)
    made = draft.speculator_config(proposal, tiny_folder, "sdpa")
    return draft.build(made, words.d2t, words.t2d, seed=parameters.seed, train_head=parameters.train_head).train()


def loaders_for(data, parameters):
    return [training.loader(training.dataset(data, parameters, s), parameters, 64, train=s == "train") for s in ("train", "val")]


def trainer_for(made, tiny_folder, folder, data=None, report=lambda _: None, attention="ttt", model=None, **changes):
    parameters = settings(**changes)
    model = model or model_for(made[1], tiny_folder, parameters)
    loaders = loaders_for(data or made[0], parameters)
    return training.make_trainer(model, parameters, *loaders, folder, attention=attention, device=CPU, report=report)


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
