"""Turn a conversation into the text a chat model was trained on.

A chat model ships a template in the Jinja language. It comes from whoever published the model, so it runs in
Jinja's sandbox, sees nothing but plain data, and whatever it raises becomes one sentence.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from reprlib import repr as shown
from typing import Any, ClassVar

from minipaged.errors import UserError
from minipaged.foundation.json_files import read_json

_ROLE = re.compile(r"[\w.-]+")
"""Templates build control tokens out of roles, as in ``'<|' + role + '|>'``, so a role must not bring its own."""


class ChatTemplate:
    """A model's chat templates, compiled at first use.

    Args:
        sources: Template text by name. ``default`` is used, or ``tool_use`` if there is one and tools are given.
        variables: What templates may use besides the messages, such as ``bos_token``.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self.variables = dict(variables)
        self._compiled: dict[str, Any] = {}

    def source(self, with_tools: bool = False) -> str:
        """Return the text of the template that is used.

        Raises:
            UserError: There are several templates, and none is the default.
        """
        if with_tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            names = ", ".join(sorted(self.sources))
            raise UserError(f"the model has the chat templates {names}, but none is called default")
        return self.sources["default"]

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the whole conversation as text.

        Args:
            messages: As `plain_messages` returns them.
            variables: Passed on to the template; each wins over a variable of the model.

        Raises:
            UserError: The template refuses the messages, in its own words, or is not valid.
        """
        source = self.source(with_tools=bool(variables.get("tools")))
        try:
            if source not in self._compiled:
                self._compiled[source] = self._environment.from_string(source)
            # Templates ask whether `tools is none`, which an undefined name is not.
            known = {"tools": None, "documents": None, **self.variables, **variables}
            return self._compiled[source].render(messages=messages, **known)
        except Exception as error:  # a template is foreign code: it can raise anything
            raise UserError(f"the model's chat template says: {error}") from error

    @cached_property
    def _environment(self) -> Any:
        """Jinja as model publishers expect it; imported here, because most starts never render anything."""
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Scope
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationBlock(Extension):
            """Accept ``{% generation %}``, a mark for training that changes no text."""

            tags: ClassVar = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return Scope(body, lineno=line)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        return environment


def load_chat_template(folder: Path, settings: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate | None:
    """Find the templates of a model folder; None when it has none.

    They may stand in ``chat_template.jinja`` (and further named ones in ``additional_chat_templates/``), in
    an older ``chat_template.json``, or in the tokenizer's settings as one text or as a list of named ones.

    Raises:
        UserError: A file cannot be read, or holds something else where a template should be.
    """
    sources = _sources(settings.get("chat_template") or "", folder / "tokenizer_config.json")
    as_json = folder / "chat_template.json"
    if as_json.is_file():
        sources |= _sources(read_json(as_json).get("chat_template"), as_json)
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        try:
            sources[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as UTF-8 text ({error})") from error
    return ChatTemplate(sources, variables) if sources else None


def _sources(found: Any, path: Path) -> dict[str, str]:
    """Return templates by name; they are written as one text, as a list of named ones, or as a dict."""
    if isinstance(found, str):
        return {"default": found} if found else {}
    pairs: list[Any] = list(found.items()) if isinstance(found, dict) else [()]
    if isinstance(found, list):
        pairs = [(entry.get("name"), entry.get("template")) if isinstance(entry, dict) else () for entry in found]
    if not all(pair and isinstance(pair[0], str) and isinstance(pair[1], str) for pair in pairs):
        raise UserError(
            f"{path}: chat_template must be a text or a list of objects with a text name and a text template, "
            f"not {shown(found)}"
        )
    return dict(pairs)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check a conversation and copy it, with each content as one string.

    Raises:
        UserError: There is no message, or one lacks a role or a content, or holds anything but text.

    Example:
        >>> plain_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
        [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise UserError("a conversation is a list of at least one message with a role and a content")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"messages[{index}] must be a dict with a role and a content, not {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise UserError(f"messages[{index}].role must be a word such as user, not {role!r}")
    rest = {key: value for key, value in message.items() if value is not None}
    return {**rest, "role": role, "content": _content_text(index, message.get("content"))}


def _content_text(index: int, content: Any) -> str:
    """Return the content as one string; the parts of a list follow each other without a gap."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UserError(f"messages[{index}].content must be text or a list of text parts, not {content!r}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UserError(f"messages[{index}].content has a part of type {kind!r}; only text parts are supported")
        texts.append(text)
    return "".join(texts)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as model templates expect it; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
