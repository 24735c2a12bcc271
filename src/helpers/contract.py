"""Hold one draft's folder against what an engine reads (see `engines`), row by row.

Neither engine tells: vLLM refuses unknown tensors but does not notice missing ones, SGLang skips both without a word, and
a wrong RoPE base or layer id only lowers acceptance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import formats, weights
from helpers.engines import CONTRACTS, NEWER, Contract
from helpers.errors import DataError, WorkbookError
from helpers.files import shown
from helpers.formats import EAGLE, IDS, Anatomy, listing

Row = tuple[str, bool | None, Any, str]


def _get(config: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(config, dict):
            config = config.get(part)
        elif isinstance(config, list) and part.isdigit() and int(part) < len(config):
            config = config[int(part)]
        else:
            return None
    return config


def check_contract(folder: Path, engine: str, *, verifier_config: Any = None) -> list[Row]:
    """Hold a draft's folder against what an engine reads.

    Args:
        engine: a name of `CONTRACTS`.
        verifier_config: the verifier's language-model config; without it the rows that compare with it are not run.

    Returns:
        rows (what, passed, found, what to do), as `pages.checks` and `pages.require` take them; passed None: not run.

    Raises:
        DataError: unknown engine.
    """
    if engine not in CONTRACTS:
        raise DataError(f"unknown engine {engine!r}", where="check_contract", do=f"one of {', '.join(CONTRACTS)}")
    c, where = CONTRACTS[engine], shown(folder / "config.json")
    depth = getattr(verifier_config, "num_hidden_layers", None)
    again = "export the draft again: workbook export RUN --to " + c.format
    try:
        config = formats.read_config(folder)
        form = formats.kind(config, where)
        if form != c.format:
            return [("format", False, form, again)]
        a = formats.anatomy(config, where, depth)
        headers = weights.headers(folder)
    except WorkbookError as error:  # nothing else can be judged then
        return [("folder can be read", False, error.what, error.do)]
    strip = formats.library_name if engine == "sglang" else lambda name: name.replace("midlayer.", "layers.0.")
    found = {strip(name): value for name, value in headers.items()}
    rows: list[Row] = [("format", True, form, again)]
    if c.architectures:
        names, do = config.get("architectures") or [], f"architectures must hold {c.architectures[0]}"
        rows.append(("architecture", bool(set(names) & set(c.architectures)), ", ".join(names), do))
    missing = [path for path in c.fields if _get(config, path) is None]
    rows.append(("config fields", not missing, f"missing: {listing(missing)}" if missing else f"{len(c.fields)} there", again))
    rows += _tensor_rows(engine, c, a, headers, found, again)
    rows += _structure_rows(engine, c, a, config, again)
    rows += _layer_id_rows(c, a, config, verifier_config, again)
    rows += _verifier_rows(a, verifier_config)
    return rows + _value_rows(folder, config, a, found, strip)


def _tensor_rows(engine: str, c: Contract, a: Anatomy, headers: dict, found: dict, again: str) -> list[Row]:
    wanted = formats.expected(a)
    queries = sorted(name for name in headers if "q_proj.weight" in name)
    named = any((name.removeprefix("model.") if engine == "sglang" else name).startswith(c.first_layer) for name in queries)
    missing = sorted(wanted.keys() - found.keys() - set(c.optional))
    # vLLM has no place for d2t where the vocabularies are equal; SGLang takes it all the same
    spare = {"d2t", "t2d"} if engine == "sglang" else {"t2d"}
    unknown = sorted(found.keys() - wanted.keys() - spare)
    wrong = [f"{n} {list(found[n][1])}, expected {list(shape)}" for n, shape in wanted.items() if n in found and found[n][1] != shape]
    refuses = "vLLM refuses to load them" if engine != "sglang" else "SGLang skips them without a word"
    prefixes = " or ".join(c.first_layer)
    told = f"missing: {listing(missing)}" if missing else f"{len(found)} there"
    return [
        ("name of the first layer", named, listing(queries, 2) or "no q_proj", f"name it {prefixes}*: another leaves a random layer"),
        ("required tensors", not missing, told, f"{again}; no engine notices"),
        ("no other tensors", not unknown, listing(unknown) or "none", f"leave them out: {refuses}"),
        ("shapes", not wrong, listing(wrong, 3) or "as config.json says", again),
    ]


def _structure_rows(engine: str, c: Contract, a: Anatomy, config: dict, again: str) -> list[Row]:
    on = [name for name, value in a.flags.items() if value]
    bad = [name for name in on if name in c.unexpressed]
    newer = [f"{name} needs SGLang with {NEWER[name]}" for name in on if engine == "sglang" and name in NEWER]
    tied = _get(config, "tie_word_embeddings") if c.format == EAGLE else _get(config, "transformer_layer_config.tie_word_embeddings")
    train = f"train with {', '.join(f'{n}: false' for n in bad)} (notebook 03), or serve it with vLLM"
    layers_fit = c.most_layers is None or a.layers <= c.most_layers
    untied = tied is False if c.format == EAGLE else tied in (False, None)
    kinds = f"{a.layers} of type {a.layer_type}" + (f", window {a.sliding_window}" if a.sliding_window else "")
    return [
        ("norm flags", not bad, "; ".join([*(f"{n} has no counterpart" for n in bad), *newer]) or ", ".join(on) or "none on", train),
        ("layers", layers_fit and (c.sliding or not a.sliding_window), kinds, "one layer of full attention, or serve it with vLLM"),
        ("head not tied to the embeddings", untied, tied, "tie_word_embeddings: false"),
        ("three states joined, or their number told", c.format == EAGLE or a.aux == 3, a.aux, "vLLM takes three in a speculators draft"),
    ]


def _layer_id_rows(c: Contract, a: Anatomy, config: dict, verifier_config: Any, again: str) -> list[Row]:
    ids = _get(config, c.ids_field)
    form = f"{c.layer_ids}; vLLM sorts them, SGLang reads other first ids in two ways by model and version"
    if not ids or a.layer_ids is None:
        return [("layer ids", False, ids, again)]
    if c.ids_field == IDS:
        right = tuple(ids) == a.layer_ids
    else:
        right = tuple(i + 1 for i in ids) == a.layer_ids and ids[0] == 1
        if getattr(verifier_config, "model_type", "") == "gpt_oss":  # read as they are since 32334, one higher before
            right = False
    rising = all(x < y for x, y in zip(ids, ids[1:], strict=False))
    rows: list[Row] = [("layer ids in the engine's counting", right and rising, ids, form)]
    depth = getattr(verifier_config, "num_hidden_layers", None)
    inside = None if depth is None else 0 <= min(a.layer_ids) and max(a.layer_ids) <= depth
    rows.append(("layer ids within the verifier", inside, f"{list(a.layer_ids)} of {depth}", "the draft was made for another verifier"))
    return rows


def _verifier_rows(a: Anatomy, verifier_config: Any) -> list[Row]:
    names = ("vocabulary and width", "RoPE", "max_position_embeddings")
    if verifier_config is None:
        return [(name, None, "no verifier given", "") for name in names]
    v = verifier_config
    own = formats.rope_of(v.to_dict())
    same = {k: x for k, x in own.items() if x is not None} == {k: x for k, x in a.rope.items() if x is not None}
    size = (a.vocab, a.hidden) == (v.vocab_size, v.hidden_size)
    return [
        (names[0], size, f"{a.vocab} × {a.hidden}; verifier {v.vocab_size} × {v.hidden_size}", "the draft was made for another verifier"),
        (names[1], same, a.rope if same else f"{a.rope}; verifier {own}", "train and serve with the verifier's RoPE"),
        (
            names[2],
            a.max_positions >= v.max_position_embeddings,
            f"{a.max_positions}; verifier {v.max_position_embeddings}",
            "set it to the verifier's: beyond a smaller one the draft collapses or the engine refuses it",
        ),
    ]


def _value_rows(folder: Path, config: dict, a: Anatomy, found: dict, strip: Any) -> list[Row]:
    import torch

    try:
        values = {strip(name): tensor for name, tensor in weights.tensors(folder).items()}
    except WorkbookError as error:
        return [("weights can be read", False, error.what, error.do)]
    floats = {name: dtype for name, (dtype, _) in found.items() if name not in ("d2t", "t2d")}
    told = config.get("dtype") or config.get("torch_dtype") or _get(config, "transformer_layer_config.dtype")
    kinds = sorted(set(floats.values()))
    maps = {name: found[name][0] for name in ("d2t", "t2d") if name in found}
    typed = len(kinds) == 1 and kinds[0] in ("bfloat16", "float16") and told == kinds[0]
    typed = typed and maps.get("d2t", "int64") == "int64" and maps.get("t2d", "bool") == "bool"
    dtypes = f"{', '.join(kinds)}; config {told}" + "".join(f"; {name} {dtype}" for name, dtype in maps.items())
    broken = [name for name, x in values.items() if x.is_floating_point() and not torch.isfinite(x).all()]
    rows: list[Row] = [
        ("dtypes", typed, dtypes, "16-bit floats as config.json says, d2t int64, t2d bool"),
        ("values finite", not broken, listing(broken) or "all", "train again; NaN in one tensor spoils every draft token"),
    ]
    return rows + map_rows(values.get("d2t"), values.get("t2d"), a)


def map_rows(d2t: Any, t2d: Any, a: Anatomy) -> list[Row]:
    """Rows on the vocabulary maps: d2t [D] offsets within range and unique, t2d [V] in agreement.

    An absent t2d passes, no engine reads it; an absent d2t passes only where the draft has the verifier's whole vocabulary.
    """
    import torch

    names = ("d2t within the vocabulary", "d2t without repeats", "t2d agrees with d2t")
    if d2t is None:
        whole = a.draft_vocab == a.vocab
        return [(names[0], whole, "no d2t", "without d2t an engine takes draft ids for the verifier's")]
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.ndim != 1:
        return [(names[0], False, f"d2t is {d2t.dtype} {list(d2t.shape)}", "int64 offsets, one per draft token")]
    target = torch.arange(len(d2t)) + d2t.long()
    outside = int(((target < 0) | (target >= a.vocab)).sum())
    repeats = len(target) - len(target.unique())
    absolute = "d2t holds offsets; these look like the verifier's ids themselves: subtract 0, 1, 2, …"
    do = absolute if outside and 0 <= int(d2t.min()) and int(d2t.max()) < a.vocab else "make the maps again with notebook 02"
    rows: list[Row] = [
        (names[0], not outside, f"{len(target) - outside} of {len(target)}, up to {int(target.max())} of {a.vocab}", do),
        (names[1], not repeats, f"{repeats} repeats", do),
    ]
    if t2d is not None and not outside:
        marked = torch.zeros(a.vocab, dtype=torch.bool)
        marked[target] = True
        agrees = t2d.shape == marked.shape and torch.equal(t2d.bool(), marked)
        rows.append((names[2], agrees, f"{int(t2d.sum())} marked, {len(target.unique())} mapped", "make the maps again with notebook 02"))
    return rows


def engine_of(folder: Path) -> str:
    """The contract under which vLLM reads this draft as it is, by the form of its config.

    Raises:
        MissingInput, DataError: no config of a draft there.
    """
    form = formats.kind(formats.read_config(folder), shown(folder / "config.json"))
    return next(name for name, c in CONTRACTS.items() if c.format == form and name.startswith("vllm"))


def failed(rows: list[Row]) -> list[str]:
    """Lines for the rows that failed: what, found, what to do."""
    return [f"{what}: {found} ({do})" for what, passed, found, do in rows if passed is False]
