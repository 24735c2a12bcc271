"""Chain records for the tests: by hand, and drawn from known rates of acceptance."""

import numpy as np


def record(name, steps, *, category="writing", prompt_tokens=10, tokens=None, guesses=None):
    """A record from (drafted, accepted, emitted, miss) per step; tokens are 0, 1, 2, … unless given."""
    drafted, accepted, emitted, miss = (list(column) for column in zip(*steps, strict=True)) if steps else ([], [], [], [])
    made = {"id": name, "category": category, "prompt_tokens": prompt_tokens, "drafted": drafted, "accepted": accepted}
    made |= {"emitted": emitted, "miss": miss, "tokens": list(range(1 + sum(emitted))) if tokens is None else tokens}
    return made | ({"guesses": guesses} if guesses is not None else {})


def drawn(prompts, rates, *, seed, steps=20, spread=0.0, categories=("writing", "coding")):
    """Records in which slot i is accepted with probability rates[i], moved by a normal draw of `spread` for each prompt."""
    rng, k, records = np.random.default_rng(seed), len(rates), []
    for p in range(prompts):
        chances = np.clip(np.asarray(rates) + rng.normal(0, spread), 0, 1)
        accepted = [int(a) for a in np.cumprod(rng.random((steps, k)) < chances, axis=1).sum(1)]
        rows = [(k, a, a + 1, "" if a == k else ("outside" if rng.random() < 0.2 else "wrong")) for a in accepted]
        records.append(record(f"p{p}", rows, category=categories[p % len(categories)], prompt_tokens=int(rng.integers(20, 300))))
    return records
