"""The chat template in both directions: messages to rendered text and token ids, a generated answer back to text.

Special tokens are written by the template alone (`add_special_tokens=False`, as vLLM does), so no second BOS creeps in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from helpers.errors import DataError, VerifierError
from helpers.files import shown
from helpers.messages import Message


def _name(tokenizer: Any) -> str:
    return shown(tokenizer.name_or_path) if getattr(tokenizer, "name_or_path", "") else type(tokenizer).__name__


def template(tokenizer: Any, tools: Any = None) -> str:
    """Source of the chat template in use.

    Raises:
        VerifierError: there is none, or several without a default.
    """
    try:
        return tokenizer.get_chat_template(None, tools)
    except ValueError as error:
        raise VerifierError(
            f"the tokenizer of {_name(tokenizer)} has no chat template" if not tokenizer.chat_template else str(error),
            where="verifier",
            do="choose an instruction-tuned verifier, or put its chat_template.jinja into the verifier's folder",
        ) from error


def _with_text_arguments(messages: list[Message]) -> list[Message]:
    """The messages with tool call arguments as JSON text: some templates (DeepSeek-V3's) write them as they come."""

    def text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if isinstance(function["arguments"], str):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [{**m, "tool_calls": [text(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


def apply(
    tokenizer: Any, messages: Sequence[Message], *, tools: Any = None, arguments: Mapping[str, Any] | None = None, row: str = "", **how: Any
) -> Any:
    """What `apply_chat_template` gives for `how`, its refusals as errors of ours.

    Raises:
        VerifierError: no chat template. DataError: the template refuses the messages; names the row and its roles.
    """
    template(tokenizer, tools)
    attempts = [list(messages)]
    if any(m.get("tool_calls") for m in messages):
        attempts.append(_with_text_arguments(attempts[0]))
    refused: Exception | None = None
    for attempt in attempts:
        try:
            return tokenizer.apply_chat_template(attempt, tools=tools, **how, **(arguments or {}))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            refused = refused or error
    roles = ", ".join(m["role"] for m in messages) or "none"
    raise DataError(
        f"the chat template of {_name(tokenizer)} refuses this conversation: {refused}",
        where=f"{row} (roles: {roles})".strip(),
        do="leave the row out, or give it the roles in the order the template asks for",
    ) from refused


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    row: str = "",
) -> str:
    """The text the chat template makes of `messages`.

    Args:
        generation_prompt: end with the opening of the assistant's turn.
        arguments: what else the template takes, such as `{"enable_thinking": False}`; give the same as in serving.
        row: name of the row, for the message.

    Raises:
        VerifierError: the tokenizer has no chat template.
        DataError: the template refuses these messages (order of roles, no system message allowed, …).
    """
    asked = next((m["content"].strip() for m in reversed(messages) if m["role"] == "user"), "")
    typed = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    how = {"tokenize": False, "add_generation_prompt": generation_prompt}
    refused: DataError | None = None
    for form in (messages, typed):  # templates of vision models want content as typed parts and pass over a text in silence
        try:
            text = apply(tokenizer, form, tools=tools, arguments=arguments, row=row, **how)
            if asked in text:
                return text
        except DataError as error:
            refused = refused or error
    raise refused or DataError(
        f"the chat template of {_name(tokenizer)} leaves out what the user says", where=row, do="check the verifier's chat template"
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text; special tokens written in it are recognised, none is added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens shown."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def specials(tokenizer: Any) -> dict[str, int]:
    """Special tokens of a tokenizer, text to id, those that only its added tokens list included."""
    added = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return added | {str(t): i for t, i in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)}


def prompt_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    row: str = "",
) -> list[int]:
    """Token ids the verifier is given to answer `messages`: the rendered template with the generation prompt.

    Raises:
        VerifierError: no chat template. DataError: the template refuses the messages, or an answer is their end.
    """
    if not messages or messages[-1]["role"] == "assistant":
        raise DataError("nothing to answer: the conversation is empty or ends with an answer", where=row, do="end it with a user's message")
    return encode(tokenizer, render(tokenizer, messages, generation_prompt=True, tools=tools, arguments=arguments, row=row))


def answer_text(tokenizer: Any, answer_ids: Sequence[int]) -> str:
    """Text of a generated answer without the special tokens at its end, as a later turn's template wants it."""
    ids, special = list(answer_ids), set(specials(tokenizer).values())
    while ids and ids[-1] in special:
        ids.pop()
    return decode(tokenizer, ids)
