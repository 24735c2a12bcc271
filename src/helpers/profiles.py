"""Published recipes in this workbook's parameters: what each sets, and where that is written.

A profile is read, not applied: `workbook params --profile NAME` prints its lines to paste into a parameter file, so that a
run's file still says everything the run does. Rates are for the recipe's own data and batch; a profile says what others
did, not what is best here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

from helpers.errors import ParameterError
from helpers.params import Parameters


class Profile(NamedTuple):
    """A recipe: where it is written, its parameters, and what of it this workbook does otherwise."""

    source: str
    settings: dict[str, Any]
    otherwise: str


_LIBRARY = {
    "draft_layers": 1,
    "draft_layer_type": "llama",
    "draft_window": 2048,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": False,
    "norm_output": True,
    "train_head": False,
    "train_optimizer": "muon",
    "train_learning_rate": 1.0e-3,
    "train_muon_learning_rate": 1.0e-3,
    "train_weight_decay": 0.01,
    "train_muon_weight_decay": 0.1,
    "train_betas": [0.9, 0.999],
    "train_clip": 1.0,
    "train_scheduler": "linear",
    "train_warmup_ratio": 0.01,
    "train_epochs": 20,
    "train_ttt_steps": 3,
    "train_step_decay": 1.0,
    "train_loss": "kl_div",
    "noise_std": 0.0,
}

PROFILES = {
    "eagle3_paper": Profile(
        "arXiv 2503.01840, section 4, and the authors' eagle/traineagle3 (main.py, cnets.py, ds_config.json)",
        _LIBRARY
        | {
            "draft_window": 0,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "norm_output": False,
            "train_head": True,
            "train_optimizer": "adamw",
            "train_learning_rate": 5.0e-5,
            "train_weight_decay": 0.0,
            "train_betas": [0.9, 0.95],
            "train_clip": 0.5,
            # 12,000 of 800,000 steps in ds_config.json, then linear to zero
            "train_warmup_ratio": 0.015,
            "train_epochs": 40,
            "train_ttt_steps": 7,
            "train_step_decay": 0.8,
        },
        "the head starts from the verifier's rows instead of random ones; losses are averaged over supervised positions instead of all",
    ),
    "speculators": Profile(
        "speculators 0.9.0, defaults of speculators.train.config.schema for eagle3",
        _LIBRARY,
        "the default loss is computed by our step, to the same gradients",
    ),
    "eagle3_1": Profile(
        "arXiv 2605.09992 (a norm for each joined state, the normalised state fed back) with speculators' trainer, as in its pull "
        "requests 610 and 670",
        _LIBRARY | {"norm_before_fc": False, "fc_norm": True},
        "as for speculators",
    ),
}


def profile(name: str) -> Profile:
    """A profile by name. Raises ParameterError with the names there are."""
    if name not in PROFILES:
        raise ParameterError(f"no profile {name}", where="workbook params --profile", do=f"take one of {', '.join(PROFILES)}")
    return PROFILES[name]


def lines(name: str) -> str:
    """A profile's lines for a parameter file, below comments with its source."""
    found = profile(name)
    head = [f"# Profile {name}: {found.source}.", f"# Here otherwise: {found.otherwise}.", "# Replace the lines of these names:"]
    body = [f"{key}: {value}" if isinstance(value, list) else yaml.safe_dump({key: value}).strip() for key, value in found.settings.items()]
    return "\n".join([*head, *body])


def differences(parameters: Parameters) -> list[dict[str, Any]]:
    """Parameters in which the profiles differ among themselves or from this run: one row each, this run last."""
    table = []
    for key in _LIBRARY:
        values = {name: found.settings[key] for name, found in PROFILES.items()} | {"this run": getattr(parameters, key)}
        if len({repr(v) for v in values.values()}) > 1:
            table.append({"parameter": key} | {name: str(value) for name, value in values.items()})
    return table


def nearest(parameters: Parameters) -> tuple[str, list[str]]:
    """The profile that shares most parameters with this run, and the parameters in which it is left."""
    left = {name: [k for k, v in found.settings.items() if getattr(parameters, k) != v] for name, found in PROFILES.items()}
    best = min(left, key=lambda name: len(left[name]))
    return best, left[best]
