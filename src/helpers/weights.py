"""Reading the weights of a draft that may come from anywhere: safetensors or pickles, whole or in shards.

Pickles can run code when they are read; they are read with `weights_only=True`, which allows tensors alone.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from helpers.errors import DamagedInput, MissingInput
from helpers.files import shown


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors: one, or the shards an index names; safetensors before pickles.

    Raises:
        MissingInput: there is none. DamagedInput: the index cannot be read or names a file that is not beside it.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise DamagedInput("the index of the shards cannot be read", where=shown(index), do="copy the draft again") from error
            # an index comes from elsewhere: it may name files of its own folder only
            bad = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
            if bad:
                what = f"shards named by the index are not there: {', '.join(bad[:3])}"
                raise DamagedInput(what, where=shown(index), do="copy the draft again")
            return [folder / name for name in names]
    what = "no draft checkpoint: neither model.safetensors nor pytorch_model.bin"
    raise MissingInput(what, where=shown(folder), do="give the folder of a draft, or run notebook 04")


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names of a checkpoint's tensors with dtype (as torch spells it, "bfloat16") and shape; safetensors are not loaded for it."""
    from safetensors import SafetensorError, safe_open

    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32", "BOOL": "bool"}
    if weight_files(folder)[0].suffix == ".bin":
        return {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors(folder).items()}
    found = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(name)
                    found[name] = names.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise DamagedInput(f"{path.name} cannot be read: {error}", where=shown(path), do="copy or export the draft again") from error
    return found


def tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint under the names it gives them. Pickles are read with `weights_only=True` and never else.

    Raises:
        MissingInput, DamagedInput: no weights, a broken file, or a pickle that holds more than tensors.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            found |= load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            what = f"{path.name} holds more than tensors, or is broken; it was not unpickled"
            raise DamagedInput(what, where=shown(path), do="get it as model.safetensors") from error
        except (SafetensorError, OSError, RuntimeError, EOFError, TypeError) as error:
            raise DamagedInput(f"{path.name} cannot be read: {error}", where=shown(path), do="copy or export the draft again") from error
    odd = [name for name, tensor in found.items() if not isinstance(tensor, torch.Tensor)]
    if odd:
        what = f"entries that are no tensors: {', '.join(map(str, odd[:4]))}"
        raise DamagedInput(what, where=shown(folder), do="get it as model.safetensors")
    return found
