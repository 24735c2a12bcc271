"""Small drafts and batches shared by the tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a busy neighbour then costs time, not a tenfold slowdown

import pytest
import torch

from helpers import draft, embedded, params, vocab


@pytest.fixture(scope="session")
def tiny_folder():
    return embedded.ensure("tiny")


@pytest.fixture
def make_draft(tiny_folder):
    """Factory of float32 drafts on the tiny verifier; keyword arguments are parameters of the schema."""

    def make(attention="sdpa", draft_vocab_size=128, window=None, fc_norm=False, seed=0, **changes):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(tiny_folder)
        chosen = params.Parameters(draft_vocab_size=draft_vocab_size, **changes)
        proposal, _ = draft.propose(config, chosen, [2, 4, 5])
        if window:
            layers = chosen.draft_layers
            proposal["transformer_layer_config"] |= {"sliding_window": window, "layer_types": ["sliding_attention"] * layers}
        full = draft.speculator_config(proposal, tiny_folder, attention)
        full.fc_norm = fc_norm
        found = vocab.build([1] * config.vocab_size, draft_vocab_size, config.vocab_size)
        model = draft.build(full, found.d2t, found.t2d, seed=seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name and parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))  # a norm left at 1 would hide a missing factor
        return model.train()

    return make


@pytest.fixture
def make_batch():
    """Factory of packed batches as the library's collate function makes them."""

    def make(lengths, masks, *, pad=0, hidden=64, vocabulary=512, seed=0):
        torch.manual_seed(seed)
        total = sum(lengths) + pad
        documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((pad,), -1)])
        mask = torch.cat([torch.tensor(m) for m in masks] + [torch.zeros(pad, dtype=torch.long)]).bool()
        positions = torch.cat([torch.arange(1, n + 1) for n in lengths] + [torch.zeros(pad, dtype=torch.long)])
        return {
            "hidden_states": torch.randn(1, total, 3 * hidden),
            "input_ids": torch.randint(0, vocabulary, (1, total)),
            "document_ids": documents[None],
            "loss_mask": mask[None],
            "position_ids": positions[None],
            "verifier_last_hidden_states": torch.randn(1, total, hidden),
        }

    return make
