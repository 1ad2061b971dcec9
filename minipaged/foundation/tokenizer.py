"""Text to token ids and back.

A thin layer over the `tokenizers` library, which reads ``tokenizer.json`` in some hundredths of a second; the
tokenizer classes of transformers take seconds to import. Neither torch nor transformers is imported here.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import tokenizers

from minipaged.errors import UserError
from minipaged.foundation.chat_template import ChatTemplate, load_chat_template, plain_messages
from minipaged.foundation.control_tokens import ControlTokens, StandIns
from minipaged.foundation.json_files import naming, read_json

_OTHER_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "special")


def load_tokenizer(folder: Path | str) -> "Tokenizer | None":
    """Return the tokenizer of a model folder, or None when the folder has none.

    Raises:
        UserError: There are tokenizer files that cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", *_OTHER_TOKENIZER_FILES)):
        return None
    with naming(folder / "tokenizer_config.json"):
        return Tokenizer.from_folder(folder)


class Tokenizer:
    """A model's tokenizer with its end tokens and its chat template.

    Args:
        backend: The `tokenizers.Tokenizer` that does the work. It is changed to what ``settings`` say.
        settings: The contents of ``tokenizer_config.json``.
        chat_template: None for a model that was not trained to chat.

    Invariants:
        ``eos_token_ids`` are the tokenizer's own; a model's configs may name more.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.backend = backend
        self._chat_template = chat_template
        named = _named_tokens(settings or {})
        _apply_settings(backend, settings or {}, named)
        eos_id = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        self.eos_token_ids: frozenset[int] = frozenset() if eos_id is None else frozenset({eos_id})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer":
        """Read ``tokenizer.json`` and the files beside it.

        Raises:
            UserError: A file is missing or damaged.

        Cost:
            About 50 ms for 49,152 tokens. Without ``tokenizer.json`` transformers builds one: seconds.
        """
        folder = Path(folder)
        settings = _read_settings(folder)
        template = load_chat_template(folder, settings, _named_tokens(settings))
        return cls(_load_backend(folder), settings, template)

    @property
    def has_chat_template(self) -> bool:
        """Return whether `apply_chat_template` can work."""
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of plain text, in which control tokens work.

        Args:
            add_special_tokens: Put the begin token in front if the model was trained with one.

        Raises:
            UserError: It is not text, or holds half a character (a lone surrogate).
        """
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that make up no whole character become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, as the model was trained to see it.

        Control tokens that a message spells out stay ordinary text. Without such text the ids are what
        transformers gives. A begin token comes from the template alone, so there is never a second one.

        Args:
            messages: Dicts with ``role`` and ``content``; the content is text or a list of text parts.
            add_generation_prompt: End with the opening of the assistant's turn.
            template_kwargs: Further variables of the template, such as ``tools`` or ``enable_thinking``.

        Raises:
            UserError: There is no template, or it or a message is refused.
        """
        if self._chat_template is None:
            raise UserError("the model has no chat template, so it takes plain prompts only")
        variables = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
        rendered, stand_ins = self._render(self._chat_template, plain_messages(messages), variables)
        _check_text(rendered)
        return self._controls.encode(rendered, stand_ins)

    def _render(
        self, template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[str, StandIns]:
        """Return the conversation's text, with stand-ins where a message or a variable spells a control token."""
        controls = self._controls
        source = template.source(with_tools=bool(variables.get("tools")))
        try:
            stand_ins = controls.stand_ins(source, messages, variables)
        except (TypeError, ValueError) as error:
            raise UserError(f"messages and template variables must be plain data: {error}") from error
        hidden = [
            controls.hide(message, stand_ins, only_special=message["role"] == "assistant") for message in messages
        ]
        return template.render(hidden, **controls.hide(variables, stand_ins)), stand_ins

    @cached_property
    def _controls(self) -> ControlTokens:
        return ControlTokens(self.backend)


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise UserError(f"text to encode must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not valid Unicode: {error.reason} at character {error.start}") from error


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _build_with_transformers(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{file} cannot be read: {error}") from error


def _build_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Have transformers turn an older kind of tokenizer file into what `tokenizers` runs."""
    from transformers import AutoTokenizer

    try:
        built = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return built.backend_tokenizer
    except Exception as error:  # a missing package, a damaged file, a kind that only runs in Python
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{folder} has no tokenizer.json, and none can be made from its other files: {reason}"
        ) from error


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json``; tokens that it does not name come from ``special_tokens_map.json``."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            settings |= {key: value for key, value in read_json(file).items() if value is not None}
    return settings


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of ``bos_token`` and the like, which are written as text or as a dict with flags."""
    values = {name: settings.get(name) for name in _NAMED_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _apply_settings(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: dict[str, str]) -> None:
    """Bring the backend into the state that transformers would bring it into.

    ``tokenizer.json`` may carry truncation or padding from training, and the settings may name tokens that it
    lacks. Whether plain text gets a begin token is up to ``tokenizer.json`` alone, not to ``add_bos_token``.
    """
    backend.no_truncation()
    backend.no_padding()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [_added_token(entry) for entry in _listed_tokens(settings) if entry["content"] not in known]
    known |= {token.content for token in missing}
    # A named token that is not in the vocabulary would get an id that the model has no embedding for.
    missing += [
        _added_token({"content": text, "special": True})
        for text in dict.fromkeys(named.values())
        if text not in known and backend.token_to_id(text) is not None
    ]
    if missing:
        backend.add_tokens(missing)


def _listed_tokens(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of ``added_tokens_decoder`` by rising id."""
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise UserError(f"tokenizer_config.json: added_tokens_decoder must be an object, not {shown(listed)}")
    for token_id, entry in listed.items():
        if not str(token_id).isdecimal():
            raise UserError(f"tokenizer_config.json: added_tokens_decoder must have ids as keys, not {shown(token_id)}")
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise UserError(
                f"tokenizer_config.json: added_tokens_decoder[{token_id}] must be an object with a text content, "
                f"not {shown(entry)}"
            )
        flags = {name: entry[name] for name in ("normalized", *_FLAGS) if name in entry}
        if wrong := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
            raise UserError(
                f"tokenizer_config.json: added_tokens_decoder[{token_id}].{wrong[0]} must be true or false, "
                f"not {shown(flags[wrong[0]])}"
            )
    return [listed[token_id] for token_id in sorted(listed, key=int)]


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {name: entry.get(name, False) for name in _FLAGS}
    return tokenizers.AddedToken(entry["content"], normalized=entry.get("normalized", False), **flags)
