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
from helpers.rendering import apply, decode, encode, render, specials, template

TAGS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
EARLIER = "an earlier answer is not supervised: {}"
ALTERED = "the template shows it otherwise once a later turn follows (earlier reasoning dropped?)"
INSERTED = "the template writes text before an answer that its prompt lacks; that text is not supervised"
STRIPPED = "the template strips spaces around an answer"
SCAFFOLD = "the template opens an answer's prompt with text that it leaves out once the answer is given"
SPLIT = "prompt and answer are tokenised apart: together they would share a token"
PROBE = "b"
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


def _opening(whole: str, prompt: str, history: str) -> tuple[int, list[str]]:
    """Characters of `whole` that its prompt has too, up to where the answer can begin, and notes."""
    floor = len(os.path.commonprefix([whole, prompt]))
    if floor == len(prompt):
        return floor, []
    if not whole.startswith(history) or floor < len(history):
        raise _Unproven("the template changes what stands before the answer once it is given")
    return floor, [SCAFFOLD]


def _closing(region: str, closes: Sequence[re.Match[str]], first: int, eos: str) -> int:
    """Where the end of turn that starts with the `first` special token ends: at EOS, if only special tokens come before it."""
    stop = closes[first].start()
    for close in closes[first:]:
        if close.start() != stop:
            break
        stop = close.end()
        if close.group() == eos:
            return stop
    return closes[first].end()


def _answer(whole: str, prompt: str, history: str, message: Message, special: re.Pattern[str], eos: str) -> tuple[int, int, list[str]]:
    """Where in `whole` an answer of text and its end of turn stand: characters [start, stop), and notes.

    Args:
        whole: rendering up to and with the answer; prompt: up to it with the generation prompt; history: without.
    """
    floor, notes = _opening(whole, prompt, history)
    region, content, reasoning = whole[floor:], message["content"].strip(), message.get("reasoning_content", "").strip()
    closes = list(special.finditer(region))
    if not closes:
        raise _Unproven("no end-of-turn token follows the answer")
    for n, close in enumerate(closes):
        body = region[: close.start()].rstrip()
        inserted = body[: len(body) - len(content)]
        found = body.endswith(content) and reasoning in inserted
        shared = content[: len(content) - len(body.lstrip())].strip()  # reasoning whose opening the prompt already wrote
        if not found and body.strip() and shared and content.endswith(body.lstrip()) and prompt.rstrip().endswith(shared):
            inserted, found = "", floor == len(prompt)
        if not found:
            continue
        if close.group() in content:
            raise _Unproven("the answer holds the text of its end-of-turn token")
        if message["content"] != content and message["content"] not in region:
            notes.append(STRIPPED)
        moved = len(inserted) if inserted.strip() and not reasoning else 0
        return floor + moved, floor + _closing(region, closes, n, eos), [*notes, INSERTED] if moved else notes
    raise _Unproven("the template drops or changes part of the answer (its reasoning?)")


def _call(
    whole: str, plain: str, prompt: str, history: str, message: Message, special: re.Pattern[str], eos: str
) -> tuple[int, int, list[str]]:
    """As `_answer`, for an answer with tool calls.

    How the template writes a call is its own business, so it is told by what is not the call: the text inserted before an answer
    and the end of turn are those of `plain`, the same rendering with an answer of text alone, where that turn ends alike.
    """
    content, reasoning = message["content"].strip(), message.get("reasoning_content", "").strip()
    said = {"role": "assistant", "content": content or PROBE}
    start, stop, _ = _answer(plain, prompt, history, said, special, eos)
    inserted = plain[_opening(plain, prompt, history)[0] : start]
    ending = plain[start:stop].strip().removeprefix(said["content"]).strip()
    floor, notes = _opening(whole, prompt, history)
    region = whole[floor:]
    closes = list(special.finditer(region))
    stop = region.find(ending) + len(ending) if ending in region else closes[-1].end() if closes else 0
    body = region[:stop]
    names = [call["function"]["name"] for call in message["tool_calls"]]
    if not all(part in body for part in (content, reasoning, *names)):
        raise _Unproven("the template drops or changes part of the answer (its tool call?)")
    moved = len(inserted) if inserted.strip() and not reasoning and region.startswith(inserted) else 0
    return floor + moved, floor + stop, [*notes, INSERTED] if moved else notes


def _tagged(tokenizer: Any, messages: Sequence[Message], tools: Any, arguments: Any) -> tuple[list[int], list[int]] | None:
    """Ids and mask by the template's `{% generation %}` marks, where it has them and the tokenizer can place them."""
    if not TAGS.search(template(tokenizer, tools)) or not tokenizer.is_fast:
        return None
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        out = apply(tokenizer, messages, tools=tools, arguments=arguments, **how)
    except DataError:  # it wants typed parts; the boundaries do without the marks
        return None
    return list(out["input_ids"]), list(out["assistant_masks"])


def _last_tagged(tokenizer: Any, tags: tuple[list[int], list[int]], message: Message, special: Mapping[str, int]) -> tuple[list[int], int]:
    """Ids cut behind the last marked answer and its first token, where the marks alone have to do: they must mark its text exactly."""
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
    plain = not message.get("tool_calls") and not message.get("reasoning_content")
    if not closed or not plain or decode(tokenizer, ids[start : stop - 1]) != message["content"]:
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
        self.pattern = re.compile("|".join(re.escape(t) for t in sorted(self.special, key=len, reverse=True)) or r"(?!)")
        self.whole = self._text(self.messages)
        self._upto: dict[int, list[int]] = {}

    def ids(self, stop: int) -> list[int]:
        """Ids of the first `stop` characters of the rendering, by themselves."""
        if stop not in self._upto:
            self._upto[stop] = encode(self.tokenizer, self.whole[:stop])
        return self._upto[stop]

    def _text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return render(self.tokenizer, messages, generation_prompt=prompt, tools=self.tools, arguments=self.arguments, row=self.row)

    def answer(self, place: int) -> tuple[int, int, list[str]]:
        """Characters [start, stop) of the answer at message `place` in the whole rendering, and notes. Raises _Unproven."""
        before, message = self.messages[:place], self.messages[place]
        upto = self._text([*before, message]) if place + 1 < len(self.messages) else self.whole
        prompt, history = self._text(before, prompt=True), self._text(before)
        eos = self.tokenizer.eos_token or ""
        if message.get("tool_calls"):
            plain = self._text([*before, {"role": "assistant", "content": message["content"].strip() or PROBE}])
            start, stop, notes = _call(upto, plain, prompt, history, message, self.pattern, eos)
        else:
            start, stop, notes = _answer(upto, prompt, history, message, self.pattern, eos)
        if not self.whole.startswith(upto[:stop]):
            raise _Unproven(ALTERED)
        return start, stop, notes

    def joined(self, start: int, stop: int) -> tuple[list[int], list[str]]:
        """Ids of the rendering up to `stop` that begin with the ids of the prompt before `start`: what serving gives the verifier."""
        ids, head = self.ids(stop), self.ids(start)
        if ids[: len(head)] == head:
            return ids, []
        tail = encode(self.tokenizer, self.whole[start:stop])
        if decode(self.tokenizer, head + tail) != decode(self.tokenizer, ids):  # SentencePiece puts a space before what stands alone
            raise _Unproven("a token reaches from the prompt into the answer")
        return head + tail, [SPLIT]

    def tokens(self, ids: list[int], start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """Tokens of `ids` that make up the characters [start, stop). Raises _Unproven unless they do so exactly."""
        head = self.ids(start)
        upto = ids if last else self.ids(stop)
        if ids[: len(head)] != head or ids[: len(upto)] != upto:
            raise _Unproven("a token reaches across its edge")
        masked = decode(self.tokenizer, ids[len(head) : len(upto)])
        if _squeezed(masked) != _squeezed(self.whole[start:stop]):
            raise _Unproven("its tokens do not read as its text")
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
