"""The loss mask of a conversation, proven: which tokens of its rendering the verifier produced itself.

Of every answer the prompt and the conversation up to it are rendered; the answer is what the second adds to the first, up to its
end-of-turn token, and its tokens are those behind the prompt's own. Nothing is guessed: an answer whose tokens cannot be told for
certain is left unsupervised and noted, or the row is refused. `{% generation %}` marks, where a template has them, are a second
derivation and have to agree.
"""

from __future__ import annotations

import os.path
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helpers.errors import DataError
from helpers.messages import Message
from helpers.rendering import decode, encode, render, specials, template

TAGS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
EARLIER = "an earlier answer is not supervised: {}"
ALTERED = "the template shows it otherwise once a later turn follows (earlier reasoning dropped?)"
INSERTED = "the template writes text before an answer that its prompt lacks; that text is not supervised"
STRIPPED = "the template strips spaces around an answer"
SCAFFOLD = "the template opens an answer's prompt with text that it leaves out once the answer is given"
SPLIT = "prompt and answer are tokenised apart, as in serving: together they would share a token"
TRAILING = "messages behind the last answer are left out"
OPENING = "an answer before any question is not supervised"
DIFFERENT_TAGS = "the template's generation marks differ from the rendering boundaries, which were used"


@dataclass
class Mask:
    """Ids of a conversation up to its last end-of-turn token, the mask over them, and what the proof covered."""

    ids: list[int]
    mask: list[int]
    source: str
    answers: int
    supervised_answers: int
    notes: list[str]


class _Unproven(Exception):
    """Why the tokens of one answer cannot be told for certain; never leaves this module."""


def _squeezed(text: str) -> str:
    """Text for comparison: decoders differ in spaces beside special tokens and in Unicode's composed forms."""
    return "".join(unicodedata.normalize("NFC", text).split())


def _answer(
    whole: str, prompt: str, history: str, message: Message, special: Sequence[str], closer: str = ""
) -> tuple[int, int, list[str]]:
    """Where in `whole` the answer and its end-of-turn token stand: characters [start, stop) and notes.

    Args:
        whole: rendering up to and with the answer; prompt: up to it with the generation prompt; history: without.
        closer: the end-of-turn token of plain answers, needed for tool calls, whose own special tokens come before it.
    """
    notes = []
    floor = len(os.path.commonprefix([whole, prompt]))
    if floor < len(prompt):
        if not whole.startswith(history) or floor < len(history):
            raise _Unproven("the template changes what stands before the answer once it is given")
        notes.append(SCAFFOLD)
    region = whole[floor:]
    content, reasoning = message["content"].strip(), message.get("reasoning_content", "").strip()
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    closes = list(re.finditer("|".join(re.escape(t) for t in sorted(special, key=len, reverse=True)), region)) if special else []
    if calls:
        closes = next(([c] for c in closes if c.group() == closer), closes[-1:])
    if not closes:
        raise _Unproven("no end-of-turn token follows the answer")
    for close in closes:
        body = region[: close.start()].rstrip()
        if calls:
            inserted, found = "", content in body and reasoning in body and all(name in body for name in calls)
        else:
            inserted, found = body[: len(body) - len(content)], body.endswith(content) and reasoning in body[: len(body) - len(content)]
            shared = content[: len(content) - len(body.lstrip())].strip()  # reasoning whose opening the prompt already wrote
            if not found and body.strip() and shared and content.endswith(body.lstrip()) and prompt.rstrip().endswith(shared):
                inserted, found = "", floor == len(prompt)
        if not found:
            continue
        if close.group() in content:
            raise _Unproven(f"the answer holds the text of its end-of-turn token {close.group()}")
        if message["content"] != content and message["content"] not in region:
            notes.append(STRIPPED)
        moved = len(inserted) if inserted.strip() and not reasoning else 0
        return floor + moved, floor + close.end(), [*notes, INSERTED] if moved else notes
    raise _Unproven("the template drops or changes part of the answer (its reasoning or a tool call?)")


def _closer(tokenizer: Any, special: Sequence[str], tools: Any, arguments: Any) -> str:
    """End-of-turn token of a plain answer; empty when the template does not show one."""
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    texts = [
        render(tokenizer, messages, generation_prompt=opened, tools=tools, arguments=arguments)
        for messages, opened in (([asked, said], False), ([asked], True), ([asked], False))
    ]
    try:
        stop = _answer(*texts, said, special)[1]
    except _Unproven:
        return ""
    return next((t for t in sorted(special, key=len, reverse=True) if texts[0][:stop].endswith(t)), "")


def _tagged(tokenizer: Any, messages: Sequence[Message], tools: Any, arguments: Any) -> tuple[list[int], list[int]] | None:
    """Ids and mask by the template's `{% generation %}` marks, where it has them and the tokenizer can place them."""
    if not TAGS.search(template(tokenizer, tools)) or not tokenizer.is_fast:
        return None
    out = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **(arguments or {})
    )
    return list(out["input_ids"]), list(out["assistant_masks"])


def _last_tagged(tokenizer: Any, tags: tuple[list[int], list[int]], message: Message, special: Mapping[str, int]) -> tuple[list[int], int]:
    """Ids cut behind the last marked answer and its first token, where the marks alone have to do; proven by its text."""
    ids, mask = tags
    stop = len(mask) - mask[::-1].index(1) if 1 in mask else 0
    start = stop
    while start and mask[start - 1]:
        start -= 1
    while stop > start and decode(tokenizer, ids[stop - 1 : stop]).isspace():
        stop -= 1
    if stop < len(ids) and stop > start and ids[stop - 1] not in special.values():
        stop += 1
    closed = stop > start and ids[stop - 1] in special.values()
    if not closed or not _squeezed(decode(tokenizer, ids[start : stop - 1])).endswith(_squeezed(message["content"])):
        raise _Unproven("neither the rendering boundaries nor the template's generation marks give the answer with its end-of-turn token")
    return ids[:stop], start


@dataclass
class _Conversation:
    """A conversation with its rendering, ready to be asked where each answer stands."""

    tokenizer: Any
    messages: list[Message]
    tools: Any
    arguments: Mapping[str, Any] | None
    row: str

    def __post_init__(self) -> None:
        self.special = specials(self.tokenizer)
        self.whole = self.text(len(self.messages))
        called = any(m.get("tool_calls") for m in self.messages)
        self.closer = _closer(self.tokenizer, list(self.special), self.tools, self.arguments) if called else ""

    def text(self, stop: int, *, prompt: bool = False) -> str:
        """Rendering of the first `stop` messages."""
        return render(
            self.tokenizer, self.messages[:stop], generation_prompt=prompt, tools=self.tools, arguments=self.arguments, row=self.row
        )

    def answer(self, place: int) -> tuple[int, int, list[str]]:
        """Characters [start, stop) of the answer at message `place` in the whole rendering, and notes. Raises _Unproven."""
        upto = self.text(place + 1) if place + 1 < len(self.messages) else self.whole
        start, stop, notes = _answer(
            upto, self.text(place, prompt=True), self.text(place), self.messages[place], list(self.special), self.closer
        )
        if not self.whole.startswith(upto[:stop]):
            raise _Unproven(ALTERED)
        return start, stop, notes

    def joined(self, start: int, stop: int) -> tuple[list[int], list[str]]:
        """Ids of the rendering up to `stop` that begin with the ids of the prompt before `start`: what serving gives the verifier."""
        ids, head = encode(self.tokenizer, self.whole[:stop]), encode(self.tokenizer, self.whole[:start])
        if ids[: len(head)] == head:
            return ids, []
        tail = encode(self.tokenizer, self.whole[start:stop])
        if decode(self.tokenizer, tail) != self.whole[start:stop]:
            raise _Unproven("a token reaches from the prompt into the answer")
        return head + tail, [SPLIT]

    def tokens(self, ids: list[int], start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """Tokens of `ids` that make up the characters [start, stop). Raises _Unproven unless they do so exactly."""
        head = encode(self.tokenizer, self.whole[:start])
        upto = ids if last else encode(self.tokenizer, self.whole[:stop])
        if ids[: len(head)] != head or ids[: len(upto)] != upto:
            raise _Unproven("a token reaches across its edge")
        masked = decode(self.tokenizer, ids[len(head) : len(upto)])
        if _squeezed(masked) != _squeezed(self.whole[start:stop]):
            raise _Unproven(f"its tokens read {masked[:60]!r} instead of {self.whole[start:stop][:60]!r}")
        return len(head), len(upto)


def _agree(tokenizer: Any, ids: list[int], mask: list[int], tags: tuple[list[int], list[int]]) -> bool:
    """Whether the template's marks are the mask, spaces behind an end-of-turn token aside: no verifier produces those."""
    if tags[0][: len(ids)] != ids:
        return False
    behind = False
    for i, (mark, own) in enumerate(zip(tags[1], mask, strict=False)):
        behind = bool(mark and not own and i and (mask[i - 1] or behind) and decode(tokenizer, ids[i : i + 1]).isspace())
        if mark != own and not behind:
            return False
    return True


def derive(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    row: str = "",
) -> Mask:
    """Ids and loss mask of a conversation, every answer in it taken as the verifier's own.

    Raises:
        VerifierError: no chat template.
        DataError: no answer, the template refuses the messages, or the last answer's tokens cannot be told for certain.
    """
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not places or places == [0]:
        raise DataError("no answer to a question in this conversation", where=row, do="leave the row out, or let the verifier answer it")
    last = places[-1]
    notes = [TRAILING] * (last + 1 < len(messages)) + [OPENING] * (places[0] == 0)
    talk = _Conversation(tokenizer, list(messages[: last + 1]), tools, arguments, row)
    tags = _tagged(tokenizer, talk.messages, tools, arguments)
    try:
        start, stop, found = talk.answer(last)
        ids, split = talk.joined(start, stop)
        first, _ = talk.tokens(ids, start, stop, last=True)
    except _Unproven as reason:
        try:
            if tags is None:
                raise
            ids, first = _last_tagged(tokenizer, tags, talk.messages[-1], talk.special)
        except _Unproven:
            raise DataError(
                f"the tokens the verifier produced cannot be told for certain: {reason}",
                where=row,
                do="leave the row out, or let the verifier answer again: generated ids need no template to find them",
            ) from reason
        left = [EARLIER.format("the boundaries of its prompt cannot be told")] * (len(places) > 1)
        return Mask(ids, [0] * first + [1] * (len(ids) - first), "template", len(places), 1, notes + left)
    mask, supervised = [0] * first + [1] * (len(ids) - first), 1
    for place in places[:-1]:
        try:
            if place == 0:
                continue
            start, stop, more = talk.answer(place)
            head, end = talk.tokens(ids, start, stop, last=False)
            mask[head:end] = [1] * (end - head)
            supervised, found = supervised + 1, found + more
        except _Unproven as reason:
            notes.append(EARLIER.format(reason))
    agreed = tags is not None and _agree(tokenizer, ids, mask, tags)
    notes += found + split + [DIFFERENT_TAGS] * (tags is not None and not agreed)
    return Mask(ids, mask, "template" if agreed else "boundaries", len(places), supervised, notes)
