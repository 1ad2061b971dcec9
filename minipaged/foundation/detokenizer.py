"""Text from token ids as they come: characters and spaces whole, stop strings found across tokens.

A token alone has no text: it may hold half a character, and a SentencePiece piece keeps its leading space
only behind another piece. So tokens are decoded in a small window over the end of the sequence, which
restarts behind every token that completes its characters. Between the window and the reader stand two reasons
to wait::

    tokens      "go "   "HA"   "LT"   "! more"     "HA" and "HALT" could begin the stop string "HALT!", so
    held back   ""      "HA"   "HALT" ""           they wait; when it is complete the text ends before it
    released    "go "   ""     ""     ""

    tokens      E6      97     A5                  the three bytes of one character; a replacement character
    held back   U+FFFD  U+FFFD ""                  at the end may still become a real one, so it waits
    released    ""      ""     U+65E5

There is one path: an answer that is not streamed is the same text, joined.
"""

from collections.abc import Callable, Collection, Sequence

from minipaged.foundation.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
_CHARACTER_BYTES = 4  # UTF-8 needs at most so many, and a token holds at least one
_LONG_RUN = 64
_LONG_WINDOW = 16


def find_byte_token_ids(token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """Return the ids of a tokenizer's single-byte tokens, for `TextStream`; most tokenizers have none.

    Example:
        >>> sorted(find_byte_token_ids({"<0x0A>": 13, "<0x41>": 68, "A": 7}.get))
        [13, 68]
    """
    ids = [token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    return frozenset(token_id for token_id in ids if token_id is not None)


class TextStream:
    """The text of one sequence, growing token by token.

    Args:
        decode: Gives the text of token ids, with the rule for special tokens already bound; None for a model
            without a tokenizer, whose text is always empty.
        params: ``stop``, ``include_stop_str_in_output`` and ``min_tokens`` are used.
        byte_token_ids: From `find_byte_token_ids`. A byte-fallback tokenizer decodes a run of single-byte tokens
            (``<0x0A>``) together, and one wrong byte turns the whole run into replacement characters. So their
            text is released when the run ends, or when it is longer than 64 and valid; stop strings match at once.

    Invariants:
        The released pieces, joined, are ``decode`` of all ids, cut where a stop string matched.
        One exception: a run of over 64 byte tokens that was valid and then gets a wrong byte keeps its text.
        No piece ends in half a character, and none holds a part of the stop string that ends the text.

    Cost:
        Two calls of ``decode`` on a few ids per token, however long the text is.

    Example:
        >>> words = {1: "go ", 2: "HA", 3: "LT", 4: "! more"}
        >>> stream = TextStream(lambda ids: "".join(words[i] for i in ids), SamplingParams(stop="HALT!"))
        >>> [stream.push(token_id) for token_id in (1, 2, 3, 4)], stream.stopped
        (['go ', '', '', ''], True)
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str] | None,
        params: SamplingParams,
        byte_token_ids: Collection[int] = (),
    ) -> None:
        self.stopped = False  # a stop string matched
        self.num_tokens = 0  # taken so far; behind a stop string none is taken
        self._decode = decode
        self._stops: tuple[str, ...] = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._byte_token_ids = byte_token_ids
        self._is_finished = False
        self._released: list[str] = []
        # Settled text that waits since it could begin a stop string. A match cannot begin before it.
        self._waiting = ""
        self._num_exempt = 0  # this many of its first characters come from before min_tokens
        # The window: tokens whose text is settled and that only give the others their place, then the others.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._context_length = 0  # characters of the context's text
        self._pending_text = ""  # text of the pending tokens behind the context
        self._num_settled = 0  # characters of it that have moved to _waiting
        self._num_broken = 0  # so many tokens in a row have ended in a replacement character

    @property
    def text(self) -> str:
        """The text released so far; the final text once `flush` was called or a stop string matched."""
        return "".join(self._released)

    def push(self, token_ids: int | Sequence[int], is_end_token: bool = False) -> str:
        """Take the next token, or several, and return the text that can be released.

        Args:
            token_ids: Several give the same text as one at a time. Those behind a stop string are left out.
            is_end_token: The (last) token ended the sequence: it adds no text.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if is_end_token:
            ids = ids[:-1]
        pieces: list[str] = []
        for token_id in ids:
            if self._is_finished:
                break
            self.num_tokens += 1
            if self._decode is not None:
                self._take(token_id, self._decode)
                pieces.append(self._release(self._unsettled_text()))
        return "".join(pieces)

    def flush(self) -> str:
        """End the sequence and return everything held back, an incomplete character as U+FFFD."""
        if self._is_finished:
            return ""
        self._settle(len(self._pending_text))
        piece = self._release("")
        if not self._is_finished:
            piece += self._cut(len(self._waiting))
        self._is_finished = True
        return piece

    def _take(self, token_id: int, decode: Callable[[list[int]], str]) -> None:
        """Decode the window with one more token and settle the text that no later token can change."""
        text = decode([*self._context, *self._pending, token_id])[self._context_length :]
        if text == self._pending_text and not decode([token_id, token_id]):
            return  # a hidden special token; kept, a row of them would let the window grow without end
        self._pending.append(token_id)
        self._pending_text = text
        is_broken = text.endswith(REPLACEMENT)
        self._num_broken = self._num_broken + 1 if is_broken else 0
        is_in_run = token_id in self._byte_token_ids
        if is_broken:
            self._settle_broken(is_in_run, decode)
        elif not is_in_run:
            self._settle(len(text))
            self._restart(self._pending, [], decode)
        elif len(self._pending) > _LONG_RUN:
            self._settle(len(text))
            if self._context:
                # The context stays: it must not hold bytes, or the run's next bytes would be decoded with
                # them.
                self._restart(self._context, [], decode)

    def _settle_broken(self, is_in_run: bool, decode: Callable[[list[int]], str]) -> None:
        """Settle what stands before the replacement characters at the end of the window."""
        held = len(self._pending_text) - len(self._pending_text.rstrip(REPLACEMENT))
        if self._num_broken >= _CHARACTER_BYTES:
            # So many tokens are more than an incomplete character has: most of it stays as it is.
            held = min(held, _CHARACTER_BYTES - 1)
        self._settle(len(self._pending_text) - held)
        if len(self._pending) > _LONG_WINDOW and not is_in_run:
            middle = len(self._pending) - _LONG_WINDOW // 2
            self._restart(self._pending[:middle], self._pending[middle:], decode)
            self._num_settled = max(0, len(self._pending_text) - held)

    def _settle(self, length: int) -> None:
        """Move the pending text up to ``length`` to the text that waits for stop strings only."""
        self._waiting += self._pending_text[self._num_settled : length]
        self._num_settled = max(self._num_settled, length)

    def _restart(self, context: list[int], pending: list[int], decode: Callable[[list[int]], str]) -> None:
        self._context, self._pending = context, pending
        self._context_length = len(decode(context))
        self._pending_text = decode([*context, *pending])[self._context_length :]
        self._num_settled = 0

    def _unsettled_text(self) -> str:
        """Return pending text that is complete if the sequence stops here: stop strings may match in it."""
        return self._pending_text[self._num_settled :].rstrip(REPLACEMENT)

    def _release(self, unsettled: str) -> str:
        """Return the settled text that no stop string needs; end the text where one is complete."""
        text = self._waiting + unsettled
        if self.num_tokens < self._min_tokens:
            self._num_exempt = len(text)
        match = self._find_stop(text)
        if match is None:
            return self._cut(len(self._waiting) - self._length_of_begun_stop())
        self.stopped = self._is_finished = True
        self._waiting = text
        start, end = match
        return self._cut(end if self._include_stop else start)

    def _cut(self, length: int) -> str:
        piece, self._waiting = self._waiting[:length], self._waiting[length:]
        self._num_exempt = max(0, self._num_exempt - length)
        if piece:
            self._released.append(piece)
        return piece

    def _find_stop(self, text: str) -> tuple[int, int] | None:
        """Return start and end of the stop string that is complete first, of two that end together the
        longer.

        "Complete first" makes the answer independent of how the text is cut into tokens.
        """
        matches: list[tuple[int, int]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, self._num_exempt - len(stop) + 1))
            if start >= 0:
                matches.append((start, start + len(stop)))
        return min(matches, key=lambda match: (match[1], match[0]), default=None)

    def _length_of_begun_stop(self) -> int:
        """Return the length of the longest end of the waiting text that begins a stop string."""
        longest = min(len(self._waiting), max(map(len, self._stops), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._waiting[-length:]) for stop in self._stops):
                return length
        return 0
