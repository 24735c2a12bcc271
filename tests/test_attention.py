"""Implementations found, judged and chosen: faults that no loss curve shows have to be seen, and named."""

import os
import signal
import sys
import time

import pytest
import torch
from transformers import AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from helpers import (
    attention,
    attention_checks,
    attention_costs,
    attention_trap,
    attention_trial,
    decoding,
    draft,
    flash,
    params,
    probe,
    registry,
)
from helpers.errors import AttentionError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job(tiny_folder):
    """A trial of the tiny draft in this process, float32."""
    chosen = params.Parameters(draft_vocab_size=64)
    proposal, _ = draft.propose(AutoConfig.from_pretrained(tiny_folder), chosen, [2, 4, 5])
    made = {"proposal": proposal, "verifier": str(tiny_folder), "steps": 3, "lengths": [32, 64]}
    return made | {"dtype": "float32", "device": "cpu", "seed": 0, "seconds": 60.0, "folder": None}


@pytest.fixture
def register():
    """Puts a function into the registry for one test."""
    names = []

    def put(name, function):
        AttentionInterface.register(name, function)
        names.append(name)
        return {"implementation": name, "module": function.__module__, "function": function.__qualname__}

    yield put
    for name in names:
        del AttentionInterface._global_mapping[name]


def entry(name):
    return next(row for row in registry.registry() if row["implementation"] == name)


# --- the registry ------------------------------------------------------------------------------------------------


def test_every_implementation_is_listed_with_its_function_and_owner():
    found = {row["implementation"]: row for row in registry.registry()}
    assert found["sdpa"]["module"] == "transformers.integrations.sdpa_attention"
    assert found["simple_flex_attention"]["from"] == "speculators"
    assert found["ttt"]["from"] == "this workbook" and found["ttt"]["function"] == "forward"
    assert "none" in found["eager"]["registry"]
    assert found[decoding.GROUPED]["made for"] == "decoding"


def test_a_registration_of_the_users_own_is_listed(register):
    register("mine", lambda *a, **k: None)
    assert entry("mine")["from"] == "you"


def test_the_registry_is_found_after_it_has_moved(monkeypatch):
    before = registry.find()
    assert before.where == "transformers.modeling_utils"
    monkeypatch.delattr("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS")
    moved = registry.find()
    assert moved.where == "transformers.models.llama.modeling_llama" and moved.mapping is before.mapping
    assert "AttributeError" in moved.tried[0]["found"]


def test_a_registry_that_is_nowhere_is_an_error_that_names_the_places(monkeypatch):
    monkeypatch.setattr(registry, "_look", lambda place: (None, "no"))
    with pytest.raises(AttentionError, match="modeling_llama"):
        registry.find()


def test_the_place_it_never_was_gives_the_error_people_see():
    assert "cannot import name" in registry.wrong_place()["found"]


# --- the None trap -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_config_from_a_dict_has_none_and_speculators_puts_flex_there(job, kind):
    layer = job["proposal"]["transformer_layer_config"] | {"model_type": kind}
    happened = [row["happened"] for row in attention_trap.none_trap(layer)]
    assert happened[0] == "None"
    assert happened[1].startswith("runs, with eager; warned:")
    assert happened[2] == "builds, and fills in sdpa"
    assert "simple_flex_attention" in happened[3]
    assert happened[4] == "runs"
    assert happened[5].startswith("NotImplementedError: FlexAttention does not support backward on CPU")


def test_a_version_that_raises_on_none_is_reported_not_fatal(job, monkeypatch):
    def strict(self, name, default):
        return default if name == "eager" else self[name]

    monkeypatch.setattr(AttentionInterface, "get_interface", strict)
    rows = attention_trap.none_trap(job["proposal"]["transformer_layer_config"])
    assert rows[1]["happened"] == "KeyError: None"  # what transformers 5.0.0 did
    assert rows[4]["happened"] == "runs"


@pytest.mark.parametrize("choice, loaded", [("ttt", "attention sdpa, with ttt to be bound in training"), ("eager", "attention eager")])
def test_the_library_forgets_the_choice_and_our_load_does_not(choice, loaded):
    happened = [row["happened"] for row in attention_trap.after_reload(choice)]
    assert happened[0] == "nothing" and happened[1] == "attention simple_flex_attention"
    assert happened[2].startswith("NotImplementedError")
    assert happened[3:] == [choice, loaded, "runs"]


# --- checks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ttt", "sdpa"])
def test_a_right_implementation_passes_every_check(job, name):
    found = attention_checks.check(entry(name), job)
    assert found["faults"] == [] and found["trains"] and found["any_length"]
    assert max(x for k, x in found["movements"].items() if k != "what must move") == 0
    assert found["movements"]["what must move"] > 0.01
    assert found["float32"]["output"] < 1e-6 and found["float32"]["gradient"] < 1e-5
    assert found["float32"]["parameters"] == 12  # fc, seven matrices and three norms of the layer, the last norm


def sees_one_later_token(module, query, key, value, mask, **kwargs):
    later = torch.zeros_like(mask)
    at = torch.arange(mask.shape[2] - 1)
    later[:, :, at, at + 1] = True
    return sdpa_attention_forward(module, query, key, value, mask | later, **kwargs)


def sees_the_document_before(module, query, key, value, mask, **kwargs):
    n = mask.shape[2]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    return sdpa_attention_forward(module, query, key, value, torch.cat([mask[..., :n] | causal, mask[..., n:]], -1), **kwargs)


def halves_the_gradient_of_queries(module, query, key, value, mask, **kwargs):
    return sdpa_attention_forward(module, 0.5 * query + 0.5 * query.detach(), key, value, mask, **kwargs)


def sees_itself_alone(module, query, key, value, mask, **kwargs):
    own = torch.eye(mask.shape[2], dtype=torch.bool).repeat(1, mask.shape[3] // mask.shape[2])
    return sdpa_attention_forward(module, query, key, value, own[None, None], **kwargs)


def test_an_implementation_that_leaks_a_later_token_is_found(job, register):
    found = attention_checks.check(register("leaks", sees_one_later_token), job)
    assert found["movements"]["a later state"] > 1e-4  # one value among up to 160, through a layer as it is initialised
    assert "cannot take this mask: a later state" in found["faults"][0]


def test_an_implementation_that_leaks_from_the_document_before_is_found(job, register):
    found = attention_checks.check(register("leaks", sees_the_document_before), job)
    assert found["movements"]["the document before"] > 1e-3 and found["movements"]["the document after"] == 0
    assert "the document before" in found["faults"][0]


def test_an_implementation_that_leaks_nothing_but_sees_too_little_is_found(job, register):
    found = attention_checks.check(register("blind", sees_itself_alone), job)
    assert max(x for k, x in found["movements"].items() if k != "what must move") == 0
    assert found["faults"][0].startswith("wrong outputs")


def test_a_scaled_query_gradient_is_found_though_outputs_are_exact(job, register):
    found = attention_checks.check(register("half", halves_the_gradient_of_queries), job)
    assert found["float32"]["output"] < 1e-6 and found["float32"]["loss"] < 1e-5
    assert found["faults"][0].startswith("wrong gradients") and found["float32"]["worst"].endswith("q_proj.weight")
    assert found["float32"]["gradient"] == pytest.approx(0.5, abs=0.01)


def test_a_gradient_dropped_through_the_log_sum_exp_is_found(job, monkeypatch):
    """The fault other trainers had: forward exact, query and key gradients wrong."""
    kept = flash._backward0
    monkeypatch.setattr(flash, "_backward0", lambda d, q, k, v, out, lse, *a: kept(d, q, k, v, torch.zeros_like(out), lse, *a))
    found = attention_checks.check(entry("ttt"), job)
    assert found["float32"]["output"] < 1e-6
    assert found["faults"][0].startswith("wrong gradients")


def test_what_cannot_train_is_still_looked_at(job):
    found = attention_checks.check(entry("simple_flex_attention"), job)
    assert found["faults"] == ["no backward on CPU"] and "NotImplementedError" in found["said"]
    assert max(x for k, x in found["movements"].items() if k != "what must move") == 0
    assert found["any_length"] is False  # 200 tokens are no multiple of 128


def test_transformers_flex_attention_adds_the_boolean_mask_instead_of_applying_it(job):
    found = attention_checks.check(entry("flex_attention"), job)
    assert found["faults"][0] == "no backward on CPU"
    assert found["faults"][1].startswith("cannot take this mask") and found["movements"]["the document before"] > 1e-3


def test_an_unpaged_call_of_a_paged_implementation_is_put_into_words(job):
    found = attention_checks.check(entry("paged|eager"), job)
    assert found["faults"] == ["cannot take this mask"] and "paged" in found["said"]


def test_bfloat16_is_shown_beside_float32(job):
    found = attention_checks.check(entry("ttt"), job | {"dtype": "bfloat16"})
    assert found["faults"] == []
    assert 1e-4 < found["bfloat16"]["output"] < 2e-2  # bfloat16 has 8 bits: 4e-3 a rounding
    assert found["float32"]["output"] < 1e-6


@pytest.mark.parametrize(
    "error, words",
    [
        (NotImplementedError("FlexAttention does not support backward on CPU."), "no backward on CPU"),
        (ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"), "package missing: flash_attn"),
        (RuntimeError("block_mask was created for a larger length than"), "sequence not a multiple of 128"),
        (RuntimeError("Found no NVIDIA driver: CUDA"), "needs CUDA" if not torch.cuda.is_available() else None),
        (RuntimeError("attn_mask has the wrong shape"), "cannot take this mask"),
        (torch.cuda.OutOfMemoryError("too much"), "not enough memory"),
        (ValueError("something\n  else"), "ValueError: something else"),
    ],
)
def test_exceptions_become_words(error, words):
    assert words is None or probe.in_words(error) == words


# --- cost --------------------------------------------------------------------------------------------------------


def test_cost_measures_every_length(job):
    timings = attention_costs.cost(entry("ttt"), job)["timings"]
    assert [t["tokens"] for t in timings] == [32, 64]
    assert all(t["seconds"] > 0 and t["bytes"] >= 0 and t["runs"] == 3 for t in timings)


def test_a_length_that_would_take_too_long_is_left_out_with_the_reason(job):
    timings = attention_costs.cost(entry("sdpa"), job | {"seconds": 0.0})["timings"]
    assert timings[0]["seconds"] is not None
    assert timings[1]["seconds"] is None and "left out: up to" in timings[1]["note"]


def test_peak_memory_counts_what_was_freed_again():
    memory = attention_costs.Memory(CPU)
    x = torch.ones(30_000_000)  # 120 MB, touched
    del x
    assert 100e6 < memory.read() < 200e6


# --- processes ---------------------------------------------------------------------------------------------------


def test_a_process_that_hangs_is_stopped_and_what_it_had_found_is_kept(tmp_path):
    def hang(save):
        save({"faults": [], "stage": "a training step"})
        time.sleep(60)

    begun = time.monotonic()
    found = attention_trial.apart(hang, tmp_path / "x.json", 0.5)
    assert time.monotonic() - begun < 10
    assert found == {"faults": [], "ended": "took longer than 0 s in a training step"}


def test_a_process_that_crashes_says_where(tmp_path):
    def crash(save):
        save({"faults": ["no backward on CPU"], "stage": "disturbing one position"})
        os.kill(os.getpid(), signal.SIGKILL)

    found = attention_trial.apart(crash, tmp_path / "x.json", 30)
    assert found["ended"] == "crashed in disturbing one position (SIGKILL)" and found["faults"] == ["no backward on CPU"]


def test_a_fault_of_the_trial_itself_is_told(tmp_path):
    found = attention_trial.apart(lambda save: {"x": 1 / 0}, tmp_path / "x.json", 30)
    assert found == {"ended": "failed: ZeroDivisionError: division by zero"} and not attention.judge(found)["usable"]


def test_a_trial_in_its_own_process_judges_ours_and_a_registration_of_the_users(job, tmp_path, monkeypatch):
    (tmp_path / "my_attention.py").write_text(
        "from transformers.integrations.sdpa_attention import sdpa_attention_forward\n\n"
        "def unmasked(module, query, key, value, mask, **kwargs):\n"
        "    return sdpa_attention_forward(module, query, key, value, None, is_causal=False, **kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = {"implementation": "unmasked", "from": "you", "module": "my_attention", "function": "unmasked", "registry": "", "made for": ""}
    entries = [mine, entry("flash_attention_2"), entry(decoding.GROUPED), entry("ttt")]
    lines = []
    verdicts = attention.trial(
        job["proposal"], job["verifier"], steps=3, lengths=[32], dtype="float32", device=CPU, entries=entries, report=lines.append
    )
    assert [v["implementation"] for v in verdicts] == [e["implementation"] for e in entries]
    by_name = {v["implementation"]: v for v in verdicts}
    assert by_name["ttt"]["usable"] and by_name["ttt"]["timings"][0]["seconds"] > 0
    assert not by_name["unmasked"]["usable"] and "cannot take this mask" in by_name["unmasked"]["reason"]
    assert not by_name[decoding.GROUPED]["usable"] and "decoding" in by_name[decoding.GROUPED]["reason"]
    if not torch.cuda.is_available():
        assert "needs CUDA" in by_name["flash_attention_2"]["reason"]
    assert len(lines) == 2 and lines[0].startswith("ttt: right")
    assert attention.choose(verdicts, "auto")["attention"] == "ttt"
    assert "my_attention" not in sys.modules  # the trial's process imported it, not this one


# --- the choice --------------------------------------------------------------------------------------------------


def timed(name, usable=True, reason="", **seconds):
    timings = [{"tokens": int(t[1:]), "seconds": s, "bytes": 10 * int(t[1:]), "runs": 3, "note": ""} for t, s in seconds.items()]
    return {"implementation": name, "from": "x", "usable": usable, "reason": reason, "timings": timings}


VERDICTS = [
    timed("quick", t256=0.1, t2048=4.0),
    timed("steady", t256=0.2, t2048=2.0),
    timed("short", t256=0.01),
    timed("broken", usable=False, reason="wrong gradients"),
]


def test_auto_takes_the_fastest_at_the_longest_length():
    choice = attention.choose(VERDICTS, "auto")
    assert choice["attention"] == "steady" and (choice["tokens"], choice["seconds"]) == (2048, 2.0)
    assert "2.0 times as fast as quick" in choice["reason"]


def test_a_named_one_that_passed_is_taken():
    assert attention.choose(VERDICTS, "quick")["attention"] == "quick"


@pytest.mark.parametrize("wanted, said", [("broken", "wrong gradients"), ("stedy", "did you mean steady")])
def test_a_failed_or_unknown_name_is_refused_with_the_table(wanted, said):
    with pytest.raises(AttentionError, match=said) as caught:
        attention.choose(VERDICTS, wanted)
    assert all(v["implementation"] in str(caught.value) for v in VERDICTS) and "steady" in caught.value.do


def test_nothing_usable_is_an_error_even_for_auto():
    with pytest.raises(AttentionError, match="no attention can train"):
        attention.choose(VERDICTS[3:], "auto")


RIGHT = {"faults": [], "trains": True, "any_length": True, "timings": [{"tokens": 256, "seconds": 1.0, "note": ""}]}
LATE = {"tokens": 512, "seconds": None, "note": "not enough memory"}


@pytest.mark.parametrize(
    "found, usable, reason",
    [
        (RIGHT, True, "right, and trains here"),
        (RIGHT | {"any_length": False}, True, "right, and trains here; rows must be a multiple of 128 tokens"),
        (RIGHT | {"faults": ["no backward on CPU"]}, False, "no backward on CPU"),
        (RIGHT | {"timings": [*RIGHT["timings"], LATE]}, False, "512 tokens: not enough memory"),
        (RIGHT | {"ended": "crashed in a step of 512 tokens (SIGSEGV)"}, False, "crashed in a step of 512 tokens (SIGSEGV)"),
        (RIGHT | {"ended": "took longer than 9 s in a step of 512 tokens"}, True, "took longer than 9 s in a step of 512 tokens"),
        ({"faults": [], "ended": "took longer than 9 s in a training step"}, False, "took longer than 9 s in a training step"),
        ({"faults": []}, False, "was not timed"),
    ],
)
def test_verdicts_follow_from_what_was_found(found, usable, reason):
    verdict = attention.judge(found)
    assert verdict["usable"] is usable and reason in verdict["reason"]


def test_where_the_fused_kernel_cannot_serve_the_verdict_on_ours_says_so():
    assert attention.without_kernel(CPU, "bfloat16", 64) == ""
    assert "does not take float16" in attention.without_kernel(CPU, "float16", 64)
    assert "multiples of 8 up to 256, not 90" in attention.without_kernel(torch.device("cuda"), "bfloat16", 90)


def test_tables_hold_a_row_for_each_entry_that_was_tried():
    checked = {"movements": {"padding": 0.0, "what must move": 1.0}, "float32": {"output": 1e-7, "gradient": 1e-6, "worst": "fc"}}
    tried = timed("a", t16=1.0) | checked
    rows = attention.check_rows([tried, VERDICTS[3]])
    assert len(rows) == 1 and rows[0]["moved by padding"] == 0.0 and rows[0]["float32 gradient"] == 1e-6
    assert "moved by what must move" not in rows[0]
    assert attention.cost_rows([tried]) == [{"implementation": "a", **tried["timings"][0]}]
    assert attention.verdict_rows([tried])[0]["said"] is None
    forms = attention.forms(rows)
    assert forms["moved by padding"](0.0) == "0" and forms["float32 gradient"](1.3e-6) == "1e-06" and "implementation" not in forms


def test_gates_fail_on_what_the_chosen_one_got_wrong():
    errors = {"output": 1e-7, "gradient": 1e-3, "worst": "fc", "parameters": 12}
    tried = timed("a", t16=1.0) | {"movements": {"padding": 1e-3, "what must move": 1.0}, "float32": errors}
    assert [passed for _, passed, _, _ in attention.gates([tried], {"attention": "a"})] == [False, True, False]
