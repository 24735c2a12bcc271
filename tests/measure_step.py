"""Peak memory of training steps, measured in a process of its own: `python measure_step.py JSON` prints one line per run.

Run by test_step_memory.py. Each run is {hidden, tokens, vocabulary, draft_vocabulary, dtype, optimizer, head}; the first
only makes libraries allocate what they keep. Printed: bytes measured above what was held before the draft was built, bytes
expected. The caller's environment keeps glibc and MKL from holding freed memory, which is not a tensor's.
"""

import gc
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

from helpers import draft, embedded, params, step_memory, training, ttt


def status(name):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class Batches:
    """What the trainer needs of a loader: three packed rows of documents of 256 tokens, a third of each prompt."""

    batch_sampler = object()

    def __init__(self, tokens, hidden, vocabulary, dtype):
        self.tokens, self.hidden, self.vocabulary, self.dtype = tokens, hidden, vocabulary, dtype
        self.documents, self.mask = torch.arange(tokens) // 256, torch.arange(tokens) % 256 >= 86
        self.dataset = [{"hidden_states": torch.zeros(1, 3 * hidden)}]

    def __len__(self):
        return 3

    def __iter__(self):
        for seed in range(3):
            draw = torch.Generator().manual_seed(seed)
            yield {
                "hidden_states": torch.randn(1, self.tokens, 3 * self.hidden, generator=draw).to(self.dtype),
                "verifier_last_hidden_states": torch.randn(1, self.tokens, self.hidden, generator=draw).to(self.dtype),
                "input_ids": torch.randint(0, self.vocabulary, (1, self.tokens), generator=draw),
                "document_ids": self.documents[None],
                "loss_mask": self.mask[None],
                "position_ids": (1 + torch.arange(self.tokens) % 256)[None],
                "error_records": 0,
            }


def measure(run, folder):
    embedded.make_tiny(folder / "verifier", vocab_size=run["vocabulary"], layers=8, hidden=run["hidden"])
    config = AutoConfig.from_pretrained(folder / "verifier")
    chosen = {"verifier_dtype": run["dtype"], "draft_vocab_size": run["draft_vocabulary"], "train_batch_tokens": run["tokens"]}
    chosen |= {"train_optimizer": run["optimizer"], "train_head": run["head"], "max_sequence_tokens": 64, "answer_max_tokens": 32}
    parameters = params.Parameters(**chosen)
    proposal, _ = draft.propose(config, parameters, [2, 4, 5])
    batches = Batches(run["tokens"], run["hidden"], config.vocab_size, getattr(torch, run["dtype"]))
    gc.collect()
    before = status("VmRSS")
    size = run["draft_vocabulary"]
    made = draft.speculator_config(proposal, folder / "verifier", "sdpa")
    maps = torch.zeros(size, dtype=torch.long), torch.arange(config.vocab_size) < size
    model = draft.build(made, *maps, train_head=run["head"]).train()
    device = torch.device("cpu")
    trainer = training.make_trainer(model, parameters, batches, batches, folder / "run", attention="ttt", device=device)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    trainer.train_epoch(0)
    logging.getLogger("speculators.metrics").handlers = []  # the last one holds the trainer, and the next run would free it
    starts = len(ttt.plan(batches.documents, batches.mask, parameters.train_ttt_steps).starts)
    return status("VmHWM") - before, step_memory.peak(step_memory.sizes(proposal, parameters, starts=starts, device=device))


if __name__ == "__main__":
    runs = json.loads(sys.argv[1])
    for run in [runs[0] | {"hidden": 64, "tokens": 256}, *runs]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(run, Path(folder))), flush=True)
