"""The registry of attention implementations: where this transformers keeps it, and what is in it.

Models look an implementation up by `config._attn_implementation`. speculators adds an entry of its own. Ours, `ttt`, is no
entry: it replaces the draft's whole training step.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

from helpers import decoding, ttt
from helpers.errors import AttentionError

NAME = "ALL_ATTENTION_FUNCTIONS"
# Where models look it up comes second: if it ever moves from the first place, the llama layers still have to reach it.
PLACES = ("transformers.modeling_utils", "transformers.models.llama.modeling_llama")
WRONG_PLACE = "transformers.utils.generic"
LIBRARY_PLACE = "speculators.models.attention"


class Found(NamedTuple):
    """The live registry: where it was found, the mapping, and every place looked at with what was there."""

    where: str
    mapping: Any
    tried: list[dict[str, str]]


def _look(place: str) -> tuple[Any, str]:
    try:
        found = getattr(importlib.import_module(place), NAME)
    except (ImportError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"
    return found, f"{len(found)} entries"


def find() -> Found:
    """The registry this transformers looks implementations up in.

    Raises:
        AttentionError: nowhere under transformers.
    """
    where, mapping, tried = "", None, []
    loaded = [m for m in sorted(sys.modules) if m.startswith("transformers.") and NAME in vars(sys.modules[m])]
    for place in dict.fromkeys([*PLACES, *loaded]):
        if mapping is not None and place not in PLACES:
            break
        found, what = _look(place)
        if found is not None and mapping is not None:
            what = "the same object" if found is mapping else f"another object, {what}"
        elif found is not None:
            where, mapping = place, found
        tried.append({"place": f"{place}.{NAME}", "found": what})
    if mapping is None:
        raise AttentionError(f"no {NAME} in {', '.join(PLACES)}", where="transformers", do="install a version between 5.0 and 5.19")
    return Found(where, mapping, tried)


def wrong_place() -> dict[str, str]:
    """Where the registry never was, tried: `from transformers.utils.generic import …`."""
    statement = f"from {WRONG_PLACE} import {NAME}"
    try:
        exec(statement, {})  # the very line people write, with the error they see
        what = "there"
    except ImportError as error:
        what = f"{type(error).__name__}: {str(error).split(' (')[0]}"
        there = [n for n in vars(importlib.import_module(WRONG_PLACE)) if "Interface" in n]
        what += f"; what is there: {', '.join(there)}, the class a registry is made of" if there else ""
    return {"place": statement, "found": what}


def _origin(module: str) -> str:
    return {"transformers": "transformers", "speculators": "speculators", "helpers": "this workbook"}.get(module.split(".")[0], "you")


def registry() -> list[dict[str, Any]]:
    """Every implementation that could be tried, one row each: name, function, whose it is, which registry holds it, its use.

    `eager` stands in no registry (it is each layer's own fallback), nor does `ttt`.
    """
    theirs = find()
    library = getattr(importlib.import_module(LIBRARY_PLACE), NAME)
    decoding.register()
    rows = []
    for name in dict.fromkeys([*theirs.mapping, *library]):
        function = (theirs.mapping if name in theirs.mapping else library)[name]
        held = [label for label, mapping in (("transformers", theirs.mapping), ("speculators", library)) if name in mapping]
        use = "decoding" if name == decoding.GROUPED else "serving" if name.startswith("paged|") else "training"
        rows.append(_row(name, function, " and ".join(held), use))
    llama = importlib.import_module(PLACES[1])
    rows.append(_row("eager", llama.eager_attention_forward, "none: the layer's fallback", "training"))
    return [*rows, _row("ttt", ttt.forward, "none: replaces the step", "training")]


def _row(name: str, function: Any, held: str, use: str) -> dict[str, Any]:
    module, called = getattr(function, "__module__", "?"), getattr(function, "__qualname__", type(function).__name__)
    return {"implementation": name, "from": _origin(module), "module": module, "function": called, "registry": held, "made for": use}
