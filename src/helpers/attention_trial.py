"""One attention implementation tried on the draft: can it train, does it compute the right thing, what does it cost.

`python -m helpers.attention_trial JOB.json` tries the entries of a job one after another. On a CPU each runs in two forks of
that process (an import costs ten seconds, a fork nothing; memory is read per process, and an entry that crashes takes only its
fork with it). A GPU does not survive a fork, so there a job holds one entry.

`check` and `cost` may be called directly; `helpers.attention` prepares jobs and reads what they leave.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from helpers import draft, files, reference, ttt
from helpers.environment import seed_everything

TOKENS = 256  # of the row that correctness is judged on: two documents and padding
MOVED = 1e-5  # largest movement, relative to the largest state, that still counts as none
TOLERANCE = 1e-4  # relative error in float32 against the float64 reference; three steps of one layer reach 1e-6
RUNS = 3
Job = dict[str, Any]  # proposal, verifier, steps, lengths, dtype, device, seed, seconds, entries, fork, folder
Save = Callable[[dict[str, Any]], None]


def packed(documents: list[int], pad: int, proposal: dict[str, Any], device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """A packed row of random states and tokens as the library's collate function makes it, a third of each document prompt.

    States are numbers that bfloat16 holds exactly, so that both dtypes get the same input. Float32, N = documents + pad.
    """
    layer, aux = proposal["transformer_layer_config"], len(proposal["eagle_aux_hidden_state_layer_ids"])
    draw, total = torch.Generator().manual_seed(seed), sum(documents) + pad

    def states(width: int) -> torch.Tensor:
        return torch.randn(1, total, width, generator=draw).bfloat16().float()

    row = {
        "hidden_states": states(aux * layer["hidden_size"]),
        "verifier_last_hidden_states": states(layer["hidden_size"]),
        "input_ids": torch.randint(0, layer["vocab_size"], (1, total), generator=draw),
        "document_ids": torch.cat([*(torch.full((n,), i) for i, n in enumerate(documents)), torch.full((pad,), -1)])[None],
        "loss_mask": torch.cat([*(torch.arange(n) >= max(8, n // 3) for n in documents), torch.zeros(pad, dtype=torch.bool)])[None],
        "position_ids": torch.cat([*(torch.arange(1, n + 1) for n in documents), torch.zeros(pad, dtype=torch.long)])[None],
    }
    return {name: value.to(device) for name, value in row.items()}


class Probe:
    """A draft with one implementation in it, and what its layers put out at each TTT step."""

    def __init__(self, entry: dict[str, Any], job: Job):
        from speculators.losses import resolve_loss_config

        name, device, proposal = entry["implementation"], torch.device(job["device"]), job["proposal"]
        _known_here(entry)
        config = draft.speculator_config(proposal, job["verifier"], draft.library_attention(name))
        size, vocabulary = proposal["draft_vocab_size"], proposal["transformer_layer_config"]["vocab_size"]
        # which tokens the draft has changes neither time nor memory: the first ones stand in
        model = draft.build(config, torch.zeros(size, dtype=torch.long), torch.arange(vocabulary) < size, seed=job["seed"])
        self.model, self.ours, self.device, self.seen = model.to(device).train(), name == "ttt", device, []
        if self.ours:
            ttt.bind(self.model)
        self.arguments = {"ttt_steps": job["steps"], "loss_config": resolve_loss_config("kl_div", "eager")}
        self.model.norm.register_forward_pre_hook(torch.compiler.disable(lambda _, inputs: self.seen.append(inputs[0].detach())))

    def autocast(self, dtype: str) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=dtype != "float32")

    def loss(self, row: dict[str, torch.Tensor], dtype: str = "float32") -> torch.Tensor:
        """Forward over all steps; in another dtype than float32 under autocast, with states stored in it, as in training."""
        self.seen.clear()
        if dtype != "float32":
            row = {k: v.bfloat16() if v.is_floating_point() else v for k, v in row.items()}
        with self.autocast(dtype):
            return self.model(**row, **self.arguments)[1]

    def step(self, row: dict[str, torch.Tensor], dtype: str = "float32") -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
        """(states per step [rows, H], loss, gradient of every trained parameter) of one training step."""
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(row, dtype)
        loss.backward()
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.model.named_parameters() if p.requires_grad}
        return self.states(), loss.item(), found

    def states(self) -> list[torch.Tensor]:
        return [x if x.dim() == 2 else x[0] for x in self.seen]

    def places(self, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Positions that `states` has rows for: ours computes the starts alone, the library all."""
        documents = row["document_ids"][0]
        return ttt.plan(documents, row["loss_mask"][0], self.arguments["ttt_steps"]).starts if self.ours else torch.arange(len(documents))


def _known_here(entry: dict[str, Any]) -> None:
    """Registrations of the notebook's process are repeated in this one."""
    from transformers.modeling_utils import AttentionInterface

    name = entry["implementation"]
    if name not in ("ttt", "eager") and name not in AttentionInterface() and entry.get("module"):
        function = getattr(importlib.import_module(entry["module"]), entry["function"])
        AttentionInterface.register(name, function)


# --- correctness -------------------------------------------------------------------------------------------------


def in_words(error: BaseException) -> str:
    """Why an implementation cannot be used, from the exception it raised."""
    text = " ".join(str(error).split())
    short = f"{type(error).__name__}: {text[:140]}"
    if "backward on CPU" in text:
        return "no backward on CPU"
    if isinstance(error, ImportError):
        return f"package missing: {getattr(error, 'name', None) or short}"
    if isinstance(error, torch.cuda.OutOfMemoryError) or isinstance(error, MemoryError) or "can't allocate memory" in text:
        return "not enough memory"
    if "block_mask was created" in text or "multiple of 128" in text or "divisible by" in text:
        return "sequence not a multiple of 128"
    if "cuda" in text.lower() and not torch.cuda.is_available():
        return f"needs CUDA ({short})"
    if any(word in text.lower() for word in ("mask", "paged", "cache")):
        return f"cannot take this mask ({short})"
    return short


def _disturbed(row: dict[str, torch.Tensor], places: torch.Tensor, name: str = "hidden_states") -> dict[str, torch.Tensor]:
    changed = row[name].clone()
    if name == "input_ids":
        changed[0, places] = (changed[0, places] + 7) % (int(changed.max()) + 1)
    else:
        changed[0, places] += 3.0 * torch.randn(changed[0, places].shape, generator=torch.Generator().manual_seed(1)).to(changed)
    return row | {name: changed}


def movements(probe: Probe, row: dict[str, torch.Tensor], first: int) -> dict[str, float]:
    """How far states move that must not, by what was disturbed, relative to the largest state; and how far those that must.

    The first document has `first` tokens. Tokens are fed ahead of time in TTT: at step j position i may know token i + j, so a
    changed token must leave i < p - j alone, a changed state i < p at every step.
    """
    documents, places = row["document_ids"][0].cpu(), probe.places(row).cpu()
    p, at = first * 3 // 4, torch.arange(len(documents))
    probe.loss(row)
    before = probe.states()
    largest = max(x.abs().max().item() for x in before)

    def moved(changed: dict[str, torch.Tensor], still: Callable[[int], torch.Tensor]) -> float:
        probe.loss(changed)
        worst = 0.0
        for j, (a, b) in enumerate(zip(before, probe.states(), strict=True)):
            rows = still(j)[places].to(a.device)
            if rows.any():
                difference = (a[rows] - b[rows]).abs().max().item()
                worst = max(worst, difference if difference == difference else float("inf"))
        return worst / largest

    in_first, in_second, padding = documents == 0, documents == 1, documents == -1
    return {
        "a later state": moved(_disturbed(row, at[p : p + 1]), lambda j: (in_first & (at < p)) | in_second),
        "a later token": moved(_disturbed(row, at[p : p + 1], "input_ids"), lambda j: (in_first & (at < p - j)) | in_second),
        "the document before": moved(_disturbed(row, at[in_first]), lambda j: in_second),
        "the document after": moved(_disturbed(row, at[in_second]), lambda j: in_first),
        "padding": moved(_disturbed(row, at[padding]), lambda j: in_first | in_second),
        "what must move": moved(_disturbed(row, at[p : p + 1]), lambda j: in_first & (at >= p)),
    }


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    return error.item() if torch.isfinite(error) else float("inf")


def _reference(probe: Probe, row: dict[str, torch.Tensor], job: Job) -> reference.Result:
    """The float64 result; kept in the job's folder, since all entries of a job have the same weights and row."""
    path = Path(job["folder"]) / "reference.pt" if job.get("folder") else None
    mark = torch.stack([p.detach().double().abs().sum() for p in probe.model.parameters() if p.requires_grad]).cpu()
    if path and path.is_file():
        kept = torch.load(path, weights_only=True, map_location=probe.device)
        if torch.equal(kept["mark"].cpu(), mark):
            return reference.Result(kept["hidden"], kept["losses"], kept["gradients"])
    found = reference.run(probe.model, row, job["steps"])
    if path and sum(g.numel() for g in found.gradients.values()) < 1e8:
        with files.atomic(path) as scratch:
            torch.save({"mark": mark, **found._asdict()}, scratch)
    return found


def _compare(probe: Probe, row: dict[str, torch.Tensor], wanted: reference.Result, dtype: str) -> dict[str, Any]:
    states, loss, gradients = probe.step(row, dtype)
    places = probe.places(row)
    kept = (row["document_ids"][0] != -1)[places]
    errors = {name: _error(g, wanted.gradients[name]) for name, g in gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    output = max(_error(a[kept], b[places][kept]) for a, b in zip(states, wanted.hidden, strict=True))
    total = sum(wanted.losses).item()
    return {"output": output, "loss": abs(loss - total) / abs(total), "gradient": errors[worst], "worst": worst, "parameters": len(errors)}


def check(entry: dict[str, Any], job: Job, save: Save = lambda _: None) -> dict[str, Any]:
    """Whether an implementation trains this draft and computes the right thing.

    Args:
        save: called with what is known so far, `stage` naming what comes next (read when the process dies there).

    Returns:
        `faults` (words, empty when it may be used), `trains`, `movements`, `float32` and `bfloat16` (errors against the
        float64 reference: output, loss, gradient, worst parameter), `any_length`.
    """
    found: dict[str, Any] = {"faults": [], "trains": False, "movements": None, "float32": None, "bfloat16": None, "any_length": None}
    faults = found["faults"]

    def attempt(stage: str, compute: Callable[[], Any]) -> Any:
        save(found | {"stage": stage})
        try:
            return compute()
        except Exception as error:  # whatever an implementation raises is its verdict
            words = in_words(error)
            if words not in faults:
                faults.append(words)
            return None

    probe = attempt("building the draft", lambda: Probe(entry, job))
    if probe is None:
        return found
    first = TOKENS * 5 // 8
    row = packed([first, TOKENS * 5 // 16], TOKENS - first - TOKENS * 5 // 16, job["proposal"], probe.device, job["seed"])
    found["trains"] = attempt("a training step", lambda: probe.step(row)) is not None
    # what cannot train is still looked at; uncompiled, since a compiler may crash on what no one will use
    plainly = contextlib.nullcontext() if found["trains"] else torch.compiler.set_stance("force_eager")
    with torch.no_grad(), plainly:
        found["movements"] = attempt("disturbing one position", lambda: movements(probe, row, first))
        if found["movements"] is None:
            return found
        short = packed([TOKENS - 56], 0, job["proposal"], probe.device, job["seed"])
        found["any_length"] = _at_other_lengths(probe, short)
    leaks = [name for name, x in found["movements"].items() if x > MOVED and name != "what must move"]
    if leaks:
        faults.append("wrong: " + ", ".join(leaks) + f" moves what it must not ({max(found['movements'][x] for x in leaks):.1e})")
    if not found["movements"]["what must move"] > MOVED:
        faults.append("wrong: a changed state moves nothing at all")
    if found["trains"]:
        wanted = _reference(probe, row, job)
        found["float32"] = attempt("comparing with the reference", lambda: _compare(probe, row, wanted, "float32"))
        if found["float32"] and not found["float32"]["output"] <= TOLERANCE:
            faults.append(f"wrong outputs: {found['float32']['output']:.1e} from the float64 reference")
        elif found["float32"] and not found["float32"]["gradient"] <= TOLERANCE:
            faults.append(f"wrong gradients: {found['float32']['gradient']:.1e} from the float64 reference in {found['float32']['worst']}")
        if job["dtype"] != "float32":
            found["bfloat16"] = attempt("a training step in bfloat16", lambda: _compare(probe, row, wanted, job["dtype"]))
    return found


def _at_other_lengths(probe: Probe, row: dict[str, torch.Tensor]) -> bool:
    """Whether a row of 200 tokens, no multiple of 128, goes through."""
    try:
        return bool(torch.isfinite(probe.loss(row)))
    except Exception:  # as above: it is the finding
        return False


# --- cost --------------------------------------------------------------------------------------------------------


class Memory:
    """Peak memory of this process (or of the GPU) above what was held when this object was made, in bytes."""

    def __init__(self, device: torch.device):
        self.device = device
        gc.collect()
        self.base = self._peak()

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):  # without it the peak only rises, which rising lengths do anyway
                Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        self.reset()
        return self.read(0)

    def read(self, base: int | None = None) -> int:
        base = self.base if base is None else base
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - base
        status = Path("/proc/self/status")
        if status.is_file():
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            return int(lines["VmHWM"].split()[0]) * 1024 - base
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, in kilobytes elsewhere
        return peak * (1 if sys.platform == "darwin" else 1024) - base


def _available(device: torch.device) -> float:
    """Bytes that can still be had."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), float("inf"))


def cost(entry: dict[str, Any], job: Job, save: Save = lambda _: None) -> dict[str, Any]:
    """Seconds of a training step (forward and backward, median) and peak memory above the built draft, by sequence length.

    Returns:
        `timings`, one {tokens, seconds, bytes, runs, note} per length. Costs may grow with the square of the length: a length
        that would then outlast the job's seconds, or the memory there is, is left out (`seconds` None) and the note says so.
    """
    probe = Probe(entry, job)
    memory, found, begun = Memory(probe.device), {"timings": []}, time.perf_counter()
    last: dict[str, Any] | None = None
    for tokens in sorted(job["lengths"]):
        line: dict[str, Any] = {"tokens": tokens, "seconds": None, "bytes": None, "runs": 0, "note": ""}
        found["timings"].append(line)
        left = job["seconds"] - (time.perf_counter() - begun)
        growth = (tokens / last["tokens"]) ** 2 if last else 0.0
        if last and last["seconds"] * growth > left:
            line["note"] = f"left out: up to {last['seconds'] * growth:.0f} s a step, {max(0.0, left):.0f} s left"
            continue
        if last and last["bytes"] * growth > _available(probe.device):
            line["note"] = f"left out: up to {last['bytes'] * growth / 2**30:.1f} GiB, more than is free"
            continue
        save(found | {"stage": f"a step of {tokens:,} tokens"})
        runs = RUNS if not last or last["seconds"] * growth * RUNS < left else 1
        try:
            row = packed([tokens], 0, job["proposal"], probe.device, job["seed"])
            if last is None:
                _timed(probe, row, job["dtype"])  # first call: threads, kernels, compilation
            memory.reset()
            seconds = [_timed(probe, row, job["dtype"]) for _ in range(runs)]
        except Exception as error:  # as in `check`
            line["note"] = in_words(error)
            continue
        line |= {"seconds": statistics.median(seconds), "bytes": memory.read(), "runs": runs}
        last = line
    return found


def _timed(probe: Probe, row: dict[str, torch.Tensor], dtype: str) -> float:
    synchronise = torch.cuda.synchronize if probe.device.type == "cuda" else lambda: None
    probe.model.zero_grad(set_to_none=True)
    synchronise()
    begun = time.perf_counter()
    probe.loss(row, dtype).backward()
    synchronise()
    probe.seen.clear()
    return time.perf_counter() - begun


# --- processes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _forked(work: Callable[[], None]) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def apart(work: Callable[[Save], dict[str, Any]], path: Path, seconds: float) -> dict[str, Any]:
    """Run `work` in a fork and return its result; when it dies or takes too long, what it had saved, with `ended` saying so."""
    path.unlink(missing_ok=True)
    save: Save = lambda found: files.write_json(path, found)  # noqa: E731
    deadline = time.monotonic() + seconds
    with _forked(lambda: save(work(save))) as pid:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                status = None
                break
            time.sleep(0.02)
    found = json.loads(path.read_text()) if path.is_file() else {}
    if status == 0:
        return found
    what = f"took longer than {seconds:.0f} s" if status is None else f"crashed (signal {signal.Signals(status & 127).name})" if status & 127 else "failed"
    return found | {"ended": f"{what} in {found.pop('stage', 'building the draft')}"}


def run(job: Job) -> None:
    """Try the job's entries, leaving `<number>.json` for each in the job's folder."""
    folder = Path(job["folder"])
    for number, entry in enumerate(job["entries"]):
        seed_everything(job["seed"])
        if job["fork"]:
            found = apart(lambda save, entry=entry: check(entry, job, save), folder / f"check-{number}.json", job["seconds"])
            if not found.get("faults") and not found.get("ended"):
                path = folder / f"cost-{number}.json"
                costs = apart(lambda save, entry=entry: cost(entry, job, save), path, 2 * job["seconds"])
                found |= {"timings": costs.get("timings", []), "ended": costs.get("ended")}
        else:
            save: Save = lambda part: files.write_json(folder / "check-0.json", part)  # noqa: E731
            found = check(entry, job, save)
            found |= cost(entry, job) if not found["faults"] else {}
        files.write_json(folder / f"{number}.json", found | {"implementation": entry["implementation"]})


def main(argv: list[str]) -> int:
    import transformers.models.llama.modeling_llama  # noqa: F401  imported once, before any fork
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from loguru import logger
    from speculators.models import eagle3  # noqa: F401

    logger.disable("speculators")
    run(json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
