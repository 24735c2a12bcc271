"""The processes of a trial: `python -m helpers.attention_trial JOB.json` tries the entries of a job one after another.

On a CPU each entry runs in two forks of that process: an import costs ten seconds and a fork nothing, memory is read per
process, and an entry that crashes takes only its fork with it. A GPU does not survive a fork, so there a job holds one entry.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers import files
from helpers.attention_checks import check
from helpers.attention_costs import cost
from helpers.environment import seed_everything
from helpers.probe import Job, Save, said


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
        with contextlib.suppress(ChildProcessError):  # it has ended and was waited for
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def apart(work: Callable[[Save], dict[str, Any]], path: Path, seconds: float) -> dict[str, Any]:
    """Run `work` in a fork and return its result; when it dies or takes too long, what it had saved, with `ended` saying so."""
    path.unlink(missing_ok=True)
    save: Save = lambda found: files.write_json(path, found)  # noqa: E731

    def guarded() -> None:
        try:
            save(work(save))
        except Exception as error:  # of ours: what implementations raise, `check` and `cost` have caught
            save({"ended": f"failed: {said(error)}"})

    deadline, parent = time.monotonic() + seconds, os.getppid()
    with _forked(guarded) as pid:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                status = None
                break
            if os.getppid() != parent:  # the notebook's kernel was killed: nobody reads what this would find
                raise SystemExit(1)
            time.sleep(0.02)
    found = json.loads(path.read_text()) if path.is_file() else {}
    if status == 0:
        return found
    return found | {"ended": _end(status, seconds, found.pop("stage", "its first lines"))}


def _end(status: int | None, seconds: float, stage: str) -> str:
    """What became of a fork, from its wait status (None: it was stopped for taking too long)."""
    if status is None:
        return f"took longer than {seconds:.0f} s in {stage}"
    number = status & 127
    return f"crashed in {stage} ({signal.Signals(number).name})" if number else f"failed in {stage}"


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
