"""Registry and None trap against another transformers that speculators allows, installed beside the environment for the test."""

import json
import os
import subprocess
import sys

import pytest

from helpers.params import ROOT

# The oldest transformers speculators 0.9.0 allows, with the hub and tokenizers it asks for; all else is this environment's.
OLDEST = ("transformers==5.0.0", "huggingface_hub==1.33.0", "tokenizers==0.22.2")

LOOK = """
import json, transformers
from helpers import attention_trap, registry
layer = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5}
found = registry.find()
print(json.dumps({"version": transformers.__version__, "file": transformers.__file__, "where": found.where, "tried": found.tried,
                  "rows": registry.registry(), "wrong": registry.wrong_place(), "trap": attention_trap.none_trap(layer)}))
"""


def pip(*arguments):
    quiet = ["--disable-pip-version-check", "-q", "--retries", "1", "--timeout", "15"]
    command = [sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def oldest(tmp_path_factory):
    """What is found with the oldest transformers in front of this environment's."""
    target, scratch = tmp_path_factory.mktemp("oldest"), tmp_path_factory.mktemp("reach")
    done = pip("install", "--no-deps", "--no-compile", "--target", str(target), *OLDEST)
    if done.returncode and pip("download", "--no-deps", "--dest", str(scratch), "iniconfig").returncode:
        pytest.skip(f"no package index is reachable: {(done.stderr.strip().splitlines() or ['pip said nothing'])[-1]}")
    assert done.returncode == 0, done.stderr
    paths = [str(target), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == "5.0.0" and found["file"].startswith(str(target))
    return found


@pytest.mark.slow
def test_the_registry_of_the_oldest_transformers_is_found_with_its_entries(oldest):
    rows = {row["implementation"]: row for row in oldest["rows"]}
    assert oldest["where"] == "transformers.modeling_utils"
    assert oldest["tried"][1]["found"] == "the same object"
    assert {"sdpa", "flex_attention", "flash_attention_2", "simple_flex_attention", "eager", "ttt"} <= set(rows)
    assert rows["simple_flex_attention"]["from"] == "speculators" and rows["sdpa"]["from"] == "transformers"
    # 5.0.0 has entries that 5.19.0 has not, and none of its paged ones is for training
    assert {name: row["made for"] for name, row in rows.items() if "|" in name}.get("paged|sdpa") == "serving"
    assert "flash_attention_4" not in rows
    assert "cannot import name" in oldest["wrong"]["found"]


@pytest.mark.slow
def test_none_raises_with_the_oldest_transformers_where_the_newest_only_warns(oldest):
    happened = [row["happened"] for row in oldest["trap"]]
    assert happened[:4] == [
        "None",
        "KeyError: None",
        "builds, and fills in sdpa",
        "builds, and puts simple_flex_attention in its place without a word",
    ]
    assert happened[4] == "runs" and happened[5].startswith("NotImplementedError: FlexAttention does not support backward on CPU")
