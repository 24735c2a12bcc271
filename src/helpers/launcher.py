"""vLLM's own Python: finding it, and running `scripts/vllm_counters.py` there.

vLLM lives in an environment of its own, since its pins differ from ours (`make served-test` builds one, on a GPU node any
environment with vLLM will do). What goes there and comes back are files: token ids as JSON, and JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers import files
from helpers.errors import EngineError, MissingInput
from helpers.params import ROOT

PYTHON = "WORKBOOK_VLLM_PYTHON"  # environment variable naming the Python of vLLM's environment
HOME = ROOT / ".venv-vllm"  # where `make served-test` builds it
SCRIPT = ROOT / "scripts" / "vllm_counters.py"
PATIENCE = 1800  # seconds


def interpreter(chosen: str | Path = "") -> Path:
    """The Python of vLLM's environment: the one chosen, else the one WORKBOOK_VLLM_PYTHON names, else `.venv-vllm`'s.

    Raises:
        MissingInput: there is none, or it has no vLLM.
    """
    given = str(chosen) or os.environ.get(PYTHON, "")
    path = Path(given) if given else HOME / "bin" / "python"
    build = f"`make served-test` builds one in {files.shown(HOME)}; or set {PYTHON} to the Python of an environment that has vLLM"
    if not path.is_file():
        raise MissingInput("no environment with vLLM", where=files.shown(path), do=build)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([path, "-c", look], capture_output=True, env=_environment()).returncode:
        raise MissingInput("this Python has no vLLM", where=files.shown(path), do=build)
    return path


def _environment() -> dict[str, str]:
    """The environment of the other Python: ours without what would lead it to our packages."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def run(
    verifier_folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    draft_folder: Path | None = None,
    k: int = 0,
    end_ids: Sequence[int] = (),
    dtype: str = "bfloat16",
    batch_rows: int = 32,
    speed_prompts: int = 0,
    python: str | Path = "",
) -> dict[str, Any]:
    """Greedy answers of vLLM, with the draft where one is given.

    Args:
        prompts: token ids with the generation prompt.
        speed_prompts: so many of the first prompts are decoded once more, one at a time.

    Returns:
        what the script writes: `rows` {tokens, accepted, drafted} in the order of `prompts`, the last two by verification
        step; `counters`; `speed` {tokens, seconds from the first to the last token}; `seconds`; `vllm`, its version.

    Raises:
        MissingInput: vLLM is not there. EngineError: it failed, took too long, or gave something else than asked for.
    """
    where = interpreter(python)
    with tempfile.TemporaryDirectory() as scratch:
        asked, given = Path(scratch, "prompts.json"), Path(scratch, "answers.json")
        files.write_json(asked, [list(p) for p in prompts])
        command = [where, SCRIPT, "--model", verifier_folder, "--prompts", asked, "--output", given, "--max-tokens", max_tokens]
        command += ["--dtype", dtype, "--batch-rows", batch_rows, "--speed-prompts", speed_prompts]
        command += ["--end-ids", *sorted(end_ids)] if end_ids else []
        command += ["--draft", draft_folder, "--k", k] if draft_folder else []
        _start([str(part) for part in command], Path(scratch))
        try:
            found = json.loads(given.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(f"vLLM ended well but left no answers: {error}", where=files.shown(SCRIPT), do="run it by hand") from error
    if len(found["rows"]) != len(prompts) or not all(row["tokens"] for row in found["rows"]):
        raise EngineError(
            f"vLLM answered {sum(bool(row['tokens']) for row in found['rows'])} of {len(prompts)} prompts",
            where=files.shown(SCRIPT),
            do="run the script by hand with one prompt and look at its log",
        )
    return found


def _start(command: list[str], scratch: Path) -> None:
    """Run the script to its end, with the processes it starts in one group that an error or Ctrl-C ends together."""
    log = scratch / "log.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=stream, stderr=stream, start_new_session=True)
        try:
            code: int | None = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    raise EngineError(
        f"vLLM was not done after {PATIENCE // 60} minutes" if code is None else f"vLLM ended with exit code {code}",
        where="\n         ".join(["its last lines:", *(line[-300:] for line in lines[-8:])]),
        do="the last line names the cause; a draft it cannot read, too little memory and a dtype the CPU lacks are the usual ones",
    )
