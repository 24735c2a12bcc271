"""Kill training at random moments, resume it, and compare the final weights byte for byte with an uninterrupted run.

    python scripts/kills.py --kills 20

The tiny verifier, float32, one thread, noise on. Every kill is a SIGKILL at a random step plus a random part of a step, so
that some land while a checkpoint is being written; each run is killed once or twice, then resumed until it ends. Compared
are the last checkpoint (weights, optimiser, schedule) and the kept draft. Training runs in forks of this process, which an
import costs once. Prints one line per run and a summary; exit code 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})  # a fork survives no thread pool of its parent

EPOCHS = 3


def forked(work) -> int:
    """Run `work` in a fork; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def prepare(data: Path) -> None:
    """Store rows of random conversations with the tiny verifier's states."""
    import torch

    from helpers import extraction, verifier
    from helpers.conversations import from_turns

    tiny = verifier.load("tiny", dtype="float32")
    torch.manual_seed(0)
    rows = [from_turns(tiny.tokenizer, [(torch.randint(3, 500, (8,)).tolist(), torch.randint(3, 60, (24,)).tolist())]) for _ in range(40)]
    extraction.save_dataset(rows, data)
    extraction.extract(tiny, rows, data, [2, 4, 5], batch_tokens=256, report=lambda _: None)


def train(data: Path, folder: Path, optimizer: str, told: int | None = None) -> None:
    """Train, or go on training, in `folder`; a byte is written to the pipe `told` after every step."""
    import torch
    from datasets import load_from_disk
    from transformers import AutoConfig

    from helpers import draft, embedded, params, training, vocab

    chosen = {"verifier": "tiny", "verifier_dtype": "float32", "draft_vocab_size": 64, "train_batch_tokens": 64, "max_sequence_tokens": 64}
    chosen |= {"answer_max_tokens": 24, "heldout_share": 0.2, "train_epochs": EPOCHS, "noise_std": 0.1, "train_optimizer": optimizer}
    parameters = params.Parameters(**chosen)
    verifier = embedded.ensure("tiny")
    counts = vocab.token_counts([(r["input_ids"], r["loss_mask"]) for r in load_from_disk(data)], 512)
    words = vocab.build(counts, parameters.draft_vocab_size, 512)
    proposal, _ = draft.propose(AutoConfig.from_pretrained(verifier), parameters, [2, 4, 5])
    model = draft.build(draft.speculator_config(proposal, verifier, "sdpa"), words.d2t, words.t2d, seed=0).train()
    loaders = [training.loader(training.dataset(data, parameters, s), parameters, 64, train=s == "train") for s in ("train", "val")]
    device = torch.device("cpu")
    trainer = training.make_trainer(model, parameters, *loaders, folder, attention="ttt", device=device, report=lambda _: None)
    if told is not None:
        epoch = trainer.train_epoch
        trainer.train_epoch = lambda number, **_: epoch(number, step_callback=lambda: os.write(told, b"."))
    torch.manual_seed(random.randrange(2**31))  # what a new process starts from must not matter
    trainer.run_training()


def killed(data: Path, folder: Path, optimizer: str, steps: int, pause: float) -> str:
    """Train until `steps` more steps and `pause` seconds have passed, then SIGKILL; what came of it."""
    reading, writing = os.pipe()

    def work() -> None:
        os.close(reading)
        train(data, folder, optimizer, writing)

    pid = forked(work)
    os.close(writing)
    seen = 0
    while seen < steps and (got := os.read(reading, 1)):
        seen += len(got)
    if seen == steps:
        select.select([], [], [], pause)
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    code = wait(pid)
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"training failed with {code} before it could be killed")
    return f"killed after step {seen}" if code else "ended before the kill"


def finished(folder: Path) -> dict[str, str]:
    """SHA-256 of what a run leaves: the last checkpoint and the kept draft, file by file."""
    kept = sorted(p for name in ("checkpoints", "best") for p in (folder / name).rglob("*") if p.is_file())
    found = {}
    for path in kept:
        if path.suffix in (".safetensors", ".pt"):
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kills in all (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    arguments = parser.parse_args(argv)
    chance = random.Random(arguments.seed)
    import speculators.models.eagle3  # noqa: F401  imported once, before any fork
    from loguru import logger
    from transformers.utils import logging

    import helpers.training  # noqa: F401

    logger.disable("speculators")
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="In CPU autocast")

    same = done = runs = 0
    with tempfile.TemporaryDirectory() as scratch:
        root, began = Path(scratch), time.monotonic()
        data = root / "data"
        if wait(forked(lambda: prepare(data))) or wait(forked(lambda: train(data, root / "whole", arguments.optimizer))):
            raise SystemExit("the uninterrupted run failed")
        expected = finished(root / "whole")
        while done < arguments.kills:
            folder, said = root / f"run-{runs}", []
            for _ in range(min(chance.choice((1, 2)), arguments.kills - done)):
                said.append(killed(data, folder, arguments.optimizer, chance.randint(1, 14), chance.uniform(0.0, 0.05)))
                done += said[-1].startswith("killed")
            if wait(forked(lambda folder=folder: train(data, folder, arguments.optimizer))):
                raise SystemExit(f"run {runs} could not be resumed after: {', '.join(said)}")
            equal = finished(folder) == expected
            runs, same = runs + 1, same + equal
            print(f"run {runs}: {', '.join(said)}; {'identical' if equal else 'DIFFERENT'}", flush=True)
            shutil.rmtree(folder)
        print(f"{done} kills in {runs} runs of {EPOCHS} epochs ({arguments.optimizer}), {same} of {runs} ended in the same bytes")
        print(f"compared: {', '.join(expected)}; {time.monotonic() - began:.0f} s")
    return 0 if same == runs else 1


if __name__ == "__main__":
    sys.exit(main())
