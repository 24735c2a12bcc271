"""One row of any shape people have, as the messages of one prompt; a row that cannot be used says why.

Shapes are told apart row by row: OpenAI `messages` (bare, or inside a logged `request` or `body`), ShareGPT
`conversations`, Spec-Bench and MT-Bench `turns`, `prompt`, `instruction` with `input`, and bare texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from helpers.errors import DataError

Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}
IDS = ("id", "question_id", "prompt_id", "custom_id", "conversation_id", "uuid")
ANSWERS = ("completion", "response", "output")
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = tuple(form.format(kind) for kind in ("image", "audio", "video", "file") for form in ("{}", "{}_url", "input_{}"))
LISTS = ("messages", "conversations", "conversation")
LOGS = ("request", "body")
TEXTS = ("prompt", "question", "instruction")
SHAPES = (*LISTS, *LOGS, "turns", *TEXTS)


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer, or answered already (its last message is then the assistant's)."""

    id: str
    category: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    line: int = 0

    @property
    def answered(self) -> bool:
        """Whether the file gave the last answer too."""
        return self.messages[-1]["role"] == "assistant"

    def turns(self) -> list[list[Message]]:
        """The messages in chunks, each ending where the verifier has to speak; answers the file gave are left out.

        A tool call that has its result in the file stays as context: without it the result would hang in the air.
        """
        following = [*self.messages[1:], {"role": "none"}]
        kept = [
            m
            for m, after in zip(self.messages, following, strict=True)
            if m["role"] != "assistant" or (m.get("tool_calls") and after["role"] == "tool")
        ]
        chunks: list[list[Message]] = [[]]
        for message, after in zip(kept, [*kept[1:], {"role": "none"}], strict=True):
            chunks[-1].append(message)
            if message["role"] in ("user", "tool") and after["role"] not in ("assistant", "tool", "none"):
                chunks.append([])
        return chunks


class Unusable(DataError):
    """A row that cannot be used; its text is the reason."""


def _unpacked(value: Any) -> Any:
    """JSON kept as text in a column (usual on hubs) as the value it stands for; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _list(value: Any, name: str) -> list[Any]:
    value = _unpacked(value)
    if not isinstance(value, list) or not value:
        raise Unusable(f"`{name}` is {'empty' if value == [] else 'no list'}")
    return value


def _text(content: Any, role: str, where: str) -> str:
    """Content as one text. Typed parts are joined by a line break, as vLLM joins them for text templates."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(p, str) or (isinstance(p, dict) and "type" in p) for p in content):
        other = [p["type"] for p in content if isinstance(p, dict) and p["type"] not in TEXT_PARTS]
        if any(kind in MEDIA or role != "tool" for kind in other):  # a tool's own data may have a key named type
            raise Unusable(f"{where} has a part of type {other[0]!r}: only text can be used")
        if not other:
            texts = [p if isinstance(p, str) else p.get("text") for p in content]
            if not all(isinstance(t, str) for t in texts):
                raise Unusable(f"{where} has a text part without text")
            content = "\n".join(texts)
    if role == "tool" and isinstance(content, (dict, list)):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise Unusable(f"{where} has content of type {type(content).__name__}, not text")
    return content


def _call(raw: Any, where: str) -> dict[str, Any]:
    """A tool call in OpenAI's nesting, arguments as an object: templates write them with `tojson`, which would quote a text."""
    raw = _unpacked(raw)
    inner = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Unusable(f"{where} has a tool call without a function name")
    arguments = inner.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _unpacked(arguments)
    if arguments not in (None, "") and not isinstance(arguments, dict):
        raise Unusable(f"{where} has a tool call whose arguments are no JSON object")
    named = {"id": raw["id"]} if isinstance(raw.get("id"), str) else {}
    return {"type": "function", **named, "function": {"name": inner["name"], "arguments": arguments or {}}}


def _message(raw: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(raw, dict):
        raise Unusable(f"{where} is no object with a role and content")
    given = raw.get("role") if raw.get("role") is not None else raw.get("from")
    role = ROLES.get(given.strip().lower()) if isinstance(given, str) else None
    if role is None:
        raise Unusable(f"{where} has the unknown role {given!r}")
    where += f" ({role})"
    content = raw.get("content") if raw.get("content") is not None else raw.get("value")
    calls = _unpacked(raw.get("tool_calls")) or ([raw["function_call"]] if raw.get("function_call") else [])
    if role == "assistant" and given.strip().lower() in ("function_call", "tool_call"):
        calls, content = [content], None
    message: Message = {"role": role, "content": _text(content, role, where)}
    if role == "assistant":
        if not isinstance(calls, list):
            raise Unusable(f"{where} has tool calls that are no list")
        if calls:
            message["tool_calls"] = [_call(call, where) for call in calls]
        reasoning = next((raw[k] for k in ("reasoning_content", "reasoning", "thinking") if isinstance(raw.get(k), str) and raw[k]), None)
        if reasoning:
            message["reasoning_content"] = reasoning
    if role in ("user", "assistant") and not message["content"].strip() and len(message) == 2:
        raise Unusable(f"{where} is empty")
    return message | {key: raw[key] for key in ("name", "tool_call_id") if isinstance(raw.get(key), str)}


def _logged_answer(response: Any) -> list[Any]:
    """The answer in a logged response, unless it was cut short: its end-of-turn token would be a claim."""
    response = response.get("body", response) if isinstance(response, dict) else {}
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    whole = choice.get("finish_reason") in (None, "stop", "tool_calls", "function_call")
    return [choice["message"]] if whole and isinstance(choice.get("message"), dict) else []


def _shape(row: Any) -> tuple[list[Any], dict[str, Any]]:
    """Raw messages of a row, and the fields beside them (id, category, tools)."""
    if isinstance(row, str):
        return [{"role": "user", "content": row}], {}
    if isinstance(row, list):
        return _list(row, "the row"), {}
    if not isinstance(row, dict):
        raise Unusable(f"a JSON {type(row).__name__} is no prompt")
    row = {k: v for k, v in row.items() if v is not None}  # tables fill what a row lacks with nulls
    for key in LISTS:
        if key in row:
            return _list(row[key], key), row
    for key in LOGS:
        if isinstance(inner := _unpacked(row.get(key)), dict):
            raw, fields = _shape(inner)
            return raw + _logged_answer(_unpacked(row.get("response"))), {**fields, **row}
    if "turns" in row:
        return [t if isinstance(t, dict) else {"role": "user", "content": t} for t in _list(row["turns"], "turns")], row
    asked = next((row[k] for k in TEXTS if k in row), None)
    if asked is None:
        raise Unusable(f"no messages, conversations, turns, prompt or instruction; it has: {', '.join(map(str, row)) or 'nothing'}")
    raw = list(_list(asked, "prompt")) if isinstance(asked, list) else [{"role": "user", "content": asked}]
    if "instruction" in row and isinstance(asked, str) and isinstance(row.get("input"), str) and row["input"].strip():
        raw = [{"role": "user", "content": f"{asked}\n\n{row['input']}"}]
    answer = next((row[k] for k in ANSWERS if row.get(k)), None)
    if isinstance(answer, list):
        raw += answer
    elif isinstance(answer, str) and answer.strip():
        raw.append({"role": "assistant", "content": answer})
    return raw, row


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = _unpacked(fields.get("tools") or fields.get("functions") or None)
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise Unusable("`tools` is no list of function descriptions")
    return [t if "function" in t else {"type": "function", "function": t} for t in tools]


def read_row(row: Any, *, line: int = 0, default_id: str = "") -> Prompt:
    """One row of any known shape as a Prompt.

    Args:
        row: the JSON value.
        line: where it stands, kept in the prompt.
        default_id: its id when it brings none.

    Raises:
        Unusable: a DataError whose text says why the row cannot be used.
    """
    raw, fields = _shape(row)
    messages = [_message(m, n) for n, m in enumerate(raw, start=1)]
    system = next((fields[k] for k in ("system", "system_prompt") if isinstance(fields.get(k), str)), None)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    spoken = [m["role"] for m in messages if m["role"] != "system"]
    if "user" not in spoken:
        raise Unusable("no message of a user")
    if spoken[0] != "user":
        raise Unusable(f"starts with a message of the {spoken[0]}, not of the user")
    if messages[-1]["role"] == "system":
        raise Unusable("ends with a system message: nothing to answer")
    tools = _tools(fields)
    given = next((fields[k] for k in IDS if isinstance(fields.get(k), (str, int)) and str(fields[k]).strip()), default_id)
    category = fields.get("category")
    named = str(category) if isinstance(category, (str, int)) and str(category).strip() else "uncategorised"
    try:
        json.dumps([messages, tools, str(given), named], ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError):
        raise Unusable("text that is no valid Unicode (broken bytes, or half of a surrogate pair)") from None
    return Prompt(str(given), named, messages, tools, line)


