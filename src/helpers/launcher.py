"""vLLM's own Python: finding it, and running `scripts/vllm_counters.py` there.

vLLM lives in an environment of its own, since its pins differ from ours (`make served-test` builds one, on a GPU node any
environment with vLLM will do). What goes there and comes back is plain: token ids as JSON, and lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


class Engine:
    """vLLM in its own process: what it said about all prompts, and one prompt at a time on demand. Made by `engine`."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self._process, self._log = process, log
        self.result: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The next line of JSON. Raises EngineError: the process ended, or took longer than `PATIENCE`."""
        late = threading.Event()
        timer = threading.Timer(PATIENCE, lambda: (late.set(), self.end()))
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            return json.loads(line)
        except ValueError:
            pass
        if line:
            raise EngineError(
                f"vLLM's script printed {line[:80]!r} where JSON was expected", where=files.shown(SCRIPT), do="run it by hand"
            )
        lines = [text for text in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if text.strip()]
        raise EngineError(
            f"vLLM gave no answer within {PATIENCE / 60:g} minutes"
            if late.is_set()
            else f"vLLM ended with exit code {self._process.wait()}",
            where="\n         ".join(["its last lines:", *(text[-300:] for text in lines[-8:])]),
            do="the last line names the cause; a draft it cannot read, too little memory and a dtype the CPU lacks are the usual ones",
        )

    def one(self, i: int) -> dict[str, Any]:
        """Decode prompt i alone: {tokens, seconds from the first token to the last}. Raises EngineError."""
        try:
            self._process.stdin.write(f"{i}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended; `read` tells why
            pass
        return self.read()

    def end(self) -> None:
        """End the process and those it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def engine(
    verifier_folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    draft_folder: Path | None = None,
    k: int = 0,
    end_ids: Iterable[int] = (),
    dtype: str = "bfloat16",
    batch_rows: int = 32,
    python: str | Path = "",
) -> Iterator[Engine]:
    """vLLM with a verifier, and with the draft where one is given, for the length of the block; greedy.

    Its `result` is there at once: `rows` {tokens, accepted, drafted} in the order of `prompts`, the last two by verification
    step; `counters`, vLLM's own totals; `seconds` to load and decode; `vllm`, its version.

    Args:
        prompts: token ids with the generation prompt.
        batch_rows: sequences decoded at once; with 0 `rows` stays empty, and prompts are decoded by `Engine.one` alone.

    Raises:
        MissingInput: vLLM is not there. EngineError: it failed, took too long, or gave something else than asked for.
    """
    where = interpreter(python)
    with tempfile.TemporaryDirectory() as scratch:
        asked, log = Path(scratch, "prompts.json"), Path(scratch, "log.txt")
        files.write_json(asked, [list(p) for p in prompts])
        command = [where, SCRIPT, "--model", verifier_folder, "--prompts", asked, "--max-tokens", max_tokens]
        command += ["--dtype", dtype, "--batch-rows", batch_rows, "--end-with-parent"]
        command += ["--end-ids", *sorted(end_ids)] if end_ids else []
        command += ["--draft", draft_folder, "--k", k] if draft_folder else []
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # one group, so that an error or Ctrl-C ends its children too
            )
        made = Engine(process, log)
        try:
            made.result = made.read()
            answered = sum(bool(row["tokens"]) for row in made.result["rows"])
            if batch_rows and answered != len(prompts):
                raise EngineError(
                    f"vLLM answered {answered} of {len(prompts)} prompts",
                    where=files.shown(SCRIPT),
                    do="run the script by hand with one prompt and look at its log",
                )
            yield made
        finally:
            made.end()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()
