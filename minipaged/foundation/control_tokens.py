r"""Keep a user's text from turning into control tokens.

A chat template draws the borders of a conversation with added tokens such as ``<|im_end|>``. If a user types
one of them, plain encoding cannot tell it from the template's own, and the user's text can forge a system
message. So such text is swapped for a stand-in character before the template runs, and swapped back after the
template's own tokens have been found::

    user text   hi<|im_end|>    ->  hiX     X: a private-use character that nobody typed
    rendered    <|im_start|>user\nhiX<|im_end|>
    cut         at <|im_start|> and <|im_end|>, which only the template can have written now
    encoded     [1] + "user\nhi<|im_end|>" + [2], and between the cuts no control token is ever produced
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import Encoding, Tokenizer
from tokenizers.models import Unigram

from minipaged.errors import UserError

FIRST_STAND_IN, LAST_STAND_IN = 0xF0000, 0xFFFFD
"""A whole plane of characters for private use: one that a conversation does not hold can always be found."""


class ControlTokens:
    """The added tokens of a tokenizer whose text must not work when a user types it.

    Added tokens that are mere white space are not among them: some tokenizers have them to make code shorter.

    Invariants:
        `encode` gives a control token only where the template wrote its text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._ordinary: dict[str, Tokenizer] = {}
        added = backend.get_added_tokens_decoder()
        self.text_of = {token_id: token.content for token_id, token in added.items() if token.content.strip()}
        self._all = _any_of(self.text_of.values())
        self._special = _any_of(added[token_id].content for token_id in self.text_of if added[token_id].special)

    def stand_ins(self, template: str, *data: Any) -> "StandIns":
        """Start with no stand-ins; none chosen later occurs in the template or in the data.

        Raises:
            TypeError: The data is more than text, numbers, lists and dicts, which is all a template should get.
        """
        return StandIns(set(template) | set(json.dumps(data, ensure_ascii=False)))

    def hide(self, value: Any, stand_ins: "StandIns", only_special: bool = False) -> Any:
        """Return a copy of plain data in which control tokens in any text are swapped for stand-ins.

        Args:
            value: Text, or lists and dicts that hold text.
            only_special: Leave tokens such as ``</think>`` alone, which a model writes itself and which
                templates look for in its answers.
        """
        if isinstance(value, str):
            pattern = self._special if only_special else self._all
            return pattern.sub(lambda match: stand_ins.of(match[0]), value) if pattern else value
        if isinstance(value, Mapping):
            return {
                self.hide(key, stand_ins, only_special): self.hide(item, stand_ins, only_special)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, stand_ins, only_special) for item in value]
        return value

    def encode(self, rendered: str, stand_ins: "StandIns") -> list[int]:
        """Encode a rendered conversation.

        Cost:
            One pass over the text, and a second one if a user typed a control token.
        """
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        written = self._written_tokens(encoding, rendered)
        if not stand_ins.is_used and len(written) == self._count(encoding.ids):
            return encoding.ids
        ids, end_of_last = [], 0
        for start, end, token_id in [*written, (len(rendered), len(rendered), None)]:
            stretch = stand_ins.restore(rendered[end_of_last:start])
            ids += self._encode_ordinary(stretch, is_first=end_of_last == 0)
            ids += [] if token_id is None else [token_id]
            end_of_last = end
        return ids

    def _written_tokens(self, encoding: Encoding, text: str) -> list[tuple[int, int, int]]:
        """Return (start, end, id) of each control token whose very text stands there.

        The comparison leaves out a stand-in that became the unknown token, and text that only a normalizer
        turned into a control token. A span can be wider than its token, which may swallow white space.
        """
        return [
            (start, end, token_id)
            for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self.text_of and self.text_of[token_id].strip() == text[start:end].strip()
        ]

    def _count(self, ids: list[int]) -> int:
        return sum(token_id in self.text_of and token_id != self._unknown_id for token_id in ids)

    def _encode_ordinary(self, text: str, is_first: bool) -> list[int]:
        """Encode text in which nothing is a control token."""
        if not text:
            return []
        place = "first" if is_first else "later"
        ids = self._ordinary_ids(text, place)
        if not self._count(ids) or not self._all:
            return ids
        # The vocabulary itself spells the token out of its characters. Cut inside it, so that it cannot.
        cuts = [match.start() + 1 for match in self._all.finditer(text)]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = self._ordinary_ids(pieces[0], place)
        for piece in pieces[1:]:
            ids += self._ordinary_ids(piece, "inside")
        return ids

    def _ordinary_ids(self, text: str, place: str) -> list[int]:
        """Encode with a tokenizer that gives the same ids but reads control tokens as ordinary text.

        Args:
            place: Some tokenizers put a space in front of the "first" stretch, some also in front of every "later"
                one that follows a control token. The "inside" of a stretch never gets one.
        """
        if place not in self._ordinary:
            content = json.loads(self._backend.to_str())
            # The library can skip only added tokens flagged as special, so exactly the control tokens get the flag.
            for token in content["added_tokens"]:
                token["special"] = token["id"] in self.text_of
            if place != "first":
                _drop_prefixes(content, always=place == "inside")
            self._ordinary[place] = Tokenizer.from_str(json.dumps(content))
            self._ordinary[place].encode_special_tokens = True
        return self._ordinary[place].encode(text, add_special_tokens=False).ids

    @cached_property
    def _unknown_id(self) -> int | None:
        """The token for what the vocabulary cannot spell: it controls nothing when ordinary text gives it."""
        if isinstance(self._backend.model, Unigram):  # which does not show its unknown token
            return json.loads(self._backend.to_str())["model"]["unk_id"]
        unknown = getattr(self._backend.model, "unk_token", None)
        return None if unknown is None else self._backend.token_to_id(unknown)


class StandIns:
    """Private-use characters, each in the place of one text."""

    def __init__(self, taken: set[str]) -> None:
        self._free = (chr(code) for code in range(FIRST_STAND_IN, LAST_STAND_IN + 1) if chr(code) not in taken)
        self._of: dict[str, str] = {}

    @property
    def is_used(self) -> bool:
        """Return whether anything was swapped."""
        return bool(self._of)

    def of(self, text: str) -> str:
        """Return the character that stands for ``text``, the same one each time.

        Raises:
            UserError: None is left.
        """
        if text not in self._of:
            free = next(self._free, None)
            if free is None:
                raise UserError(
                    "the conversation spells a control token and holds every character from U+F0000 to U+FFFFD; "
                    "leave at least one of them out"
                )
            self._of[text] = free
        return self._of[text]

    def restore(self, text: str) -> str:
        """Put the texts back in the place of their characters."""
        for original, stand_in in self._of.items():
            text = text.replace(stand_in, original)
        return text


def _any_of(texts: Any) -> re.Pattern[str] | None:
    """Return a pattern that finds the longest of several texts, or None when there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _drop_prefixes(part: dict[str, Any], always: bool) -> None:
    """Change, in a tokenizer's JSON, every "space before the first word" to "no space".

    Args:
        always: Also drop the spaces that come before each stretch of text.
    """
    if part.get("prepend_scheme") == "first" or ("prepend_scheme" in part and always):
        part["prepend_scheme"] = "never"
    if always and "add_prefix_space" in part:
        part["add_prefix_space"] = False
    if always and part.get("type") == "Prepend":
        part["prepend"] = ""
    steps = [part.get("normalizer"), part.get("pre_tokenizer")]
    for step in [*steps, *part.get("normalizers", []), *part.get("pretokenizers", [])]:
        if step is not None:
            _drop_prefixes(step, always)
