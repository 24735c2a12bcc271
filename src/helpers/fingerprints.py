"""What decides a stage's result: the parameters of it and of all earlier stages, the prompt files, the results version."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from helpers import RESULTS_VERSION, params
from helpers.files import file_sha256, shown
from helpers.params import STAGES, Parameters

# The stage from which the *content* of a prompt file counts. Stage 01 reads the evaluation prompts only to check that
# they share nothing with the training prompts, so editing them does not make the trained draft stale. A draft that training
# starts from counts by its weights.
CONTENT_FROM = {"prompts_train": STAGES[0], "prompts_evaluation": STAGES[4], "draft_init": STAGES[3]}


def run_folder(parameters: Parameters) -> Path:
    """Folder that holds the stages of this run."""
    return params.resolve(parameters.runs_folder) / parameters.run


def upto(name: str) -> tuple[str, ...]:
    """The stage and all before it, in order."""
    return STAGES[: STAGES.index(name) + 1]


def contents(name: str, parameters: Parameters) -> dict[str, dict[str, Any]]:
    """Path, sha256 and bytes of each file that counts for `name`; hub ids and absent files are left out."""
    found = {}
    for parameter, first in CONTENT_FROM.items():
        path = params.resolve(getattr(parameters, parameter))
        path = path / "model.safetensors" if path.is_dir() else path
        if first in upto(name) and path.is_file():
            found[parameter] = {"path": shown(path), "sha256": file_sha256(path, cached=True), "bytes": path.stat().st_size}
    return found


def fingerprint(name: str, parameters: Parameters) -> str:
    """Sixteen hex digits over everything that decides what stage `name` computes."""
    parts = {
        "stages": {stage: params.fingerprint(parameters, stage) for stage in upto(name)},
        "contents": {parameter: made["sha256"] for parameter, made in contents(name, parameters).items()},
        "results_version": RESULTS_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
