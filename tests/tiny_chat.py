"""A byte-level tokenizer of 400 tokens made on the spot, and chat templates that behave like the awkward ones in use."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<tool>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and answers a question about the weather in a few words",
    "user\nassistant\nsystem\n\n you are a helpful assistant \n\n yes no what is it why how because therefore",
    "<think>\nreasoning first\n</think>\n\nthen the answer\n\n",
] * 20

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nyou are a helpful assistant<|im_end|>\n' }}{% endif %}" + CHATML
)
# Reasoning stays in the answer to the last question and is dropped from earlier ones, as Qwen3's template does.
DROPS_REASONING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning is dropped from every answer, the last one too, as DeepSeek-R1's template does; its prompt opens with <think>.
ALWAYS_DROPS_REASONING = (
    "{% for m in messages %}{% set c = m['content'].split('</think>')[-1] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# An empty reasoning block is written before the last answer, which the prompt does not have.
INSERTS_BLOCK = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
)
# Two special tokens close an answer and only the second is EOS, as in Command A's template.
TWO_ENDS = CHATML.replace("'<|im_end|>\n' }}{% endfor %}", "'<tool><|im_end|>\n' }}{% endfor %}")
# Typed parts only, as templates of vision models have it: a plain text is passed over without a word.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_BOS = "{{ bos_token }}{{ bos_token }}" + CHATML
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# What stands at the top changes once the answer is given, so prompt and whole share no beginning.
SHIFTING = "{% if add_generation_prompt %}open {% endif %}" + TAGGED
TOOLS = (
    "{% if tools %}{{ 'tools: ' + tools | tojson + '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}{{ '<tool>' + c.function.name + ' ' + c.function.arguments | tojson + '<tool>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@lru_cache(maxsize=1)
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet))
    # As many real ones do, it adds a BOS by itself when asked for special tokens: rendering must never ask.
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer.to_str()


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a chat template."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), bos_token="<s>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<tool>"]})
    made.chat_template = template
    return made


def sentencepiece_like(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes a space before any text that stands alone, as Llama 2's does."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL]))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>")
    made.chat_template = template
    return made


class Slow(PreTrainedTokenizer):
    """A tokenizer in plain Python, one token per character, without offsets: Kimi-K2.5's is of this kind."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    @property
    def vocab_size(self) -> int:
        return 256

    def _tokenize(self, text: str, **_) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def chat(*texts: str, system: str = "") -> list[dict[str, str]]:
    """Messages from texts that user and assistant say in turn."""
    told = [{"role": "system", "content": system}] if system else []
    return told + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
