"""Conversations become the ids that transformers gives; what cannot be rendered becomes one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minipaged.errors import UserError
from minipaged.foundation.tokenizer import Tokenizer, load_tokenizer
from tests.small_tokenizers import (
    LLAMA,
    byte_level_backend,
    chatml,
    save,
    sentencepiece,
    sentencepiece_backend,
    user,
)

CONVERSATIONS = {
    "one question": [user("What is the capital of France?")],
    "system message": [{"role": "system", "content": "Be brief."}, user("Hi")],
    "several turns": [user("Hi"), {"role": "assistant", "content": "Hello!"}, user("2024  and 1.\n\n1. x")],
    "emoji and scripts": [user("naïve 日本語 😀 नमस्ते 삼겹살 👩‍👩‍👧")],
    "code": [user("```python\ndef f(x):\n\treturn {'a': [1, 2]}  # <b>\n```\n<|not_a_token|>")],
    "empty": [user("")],
    "assistant last": [user("Hi"), {"role": "assistant", "content": "He"}],
}


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(smollm2_folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def smollm2_in_transformers(smollm2_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_conversation_gives_the_ids_that_transformers_gives(
    name: str, add_generation_prompt: bool, smollm2: Tokenizer, smollm2_in_transformers: Any
) -> None:
    theirs = smollm2_in_transformers
    expected = theirs.apply_chat_template(
        CONVERSATIONS[name], add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert smollm2.apply_chat_template(CONVERSATIONS[name], add_generation_prompt) == expected


TRICKY_TEMPLATE = """
{%- set ns = namespace(seen=0) -%}
{% for message in messages %}
    {% if loop.index0 == 0 and message.role == 'system' %}
{{ message.content | trim | upper }}
        {% continue %}
    {% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% generation %}
{{ bos_token }}{{ {'n': ns.seen, 'text': message.content} | tojson }}{{ eos_token }}
    {% endgeneration %}
{% endfor %}
{% if tools is none %}no tools{% endif %} {{ strftime_now('%Y') | length }} {{ mood }} {{ pad_token is defined }}
"""


@pytest.mark.parametrize("prefix", ["legacy", "first"])
@pytest.mark.parametrize("template", [LLAMA, TRICKY_TEMPLATE], ids=["llama", "tricky"])
def test_sentencepiece_and_jinja_extensions_give_the_ids_that_transformers_gives(
    prefix: str, template: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = save(tmp_path, sentencepiece_backend(prefix), template, **named)
    messages = [user(" hi  <b>ü</b> 😀"), {"role": "assistant", "content": "hi"}, user("hi")]
    if template is TRICKY_TEMPLATE:
        messages.insert(0, {"role": "system", "content": " be kind "})
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, mood="<good>")
    ours = Tokenizer.from_folder(folder)
    assert ours.apply_chat_template(messages, mood="<good>") == expected
    assert "<good>" in ours.decode(expected) or template is LLAMA


def write_as_text(folder: Path) -> None:
    save(folder, byte_level_backend(), "text {{ messages[0].content }}")


def write_as_list(folder: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "list {{ messages[0].content }}"},
    ]
    save(folder, byte_level_backend(), chat_template=named)


def write_as_jinja_file(folder: Path) -> None:
    save(folder, byte_level_backend(), "not this one")
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")


def write_as_json_file(folder: Path) -> None:
    save(folder, byte_level_backend())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json {{ messages[0].content }}"}))


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_as_text, "text hi"),
        (write_as_list, "list hi"),
        (write_as_jinja_file, "file hi"),
        (write_as_json_file, "json hi"),
    ],
)
def test_a_template_is_found_wherever_it_may_stand(
    write: Callable[[Path], None], expected: str, tmp_path: Path
) -> None:
    write(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.apply_chat_template([user("hi")])) == expected


def test_the_template_for_tools_is_taken_when_tools_are_given(tmp_path: Path) -> None:
    write_as_list(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.apply_chat_template([user("hi")], tools=[{"name": "f"}])) == "tools"
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("other tools")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.apply_chat_template([user("hi")], tools=[{"name": "f"}])) == "other tools"


def test_named_templates_without_a_default_are_listed(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(UserError, match="rag"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([user("hi")])


def test_without_a_template_chat_is_refused_in_one_sentence() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template([user("hi")])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ nothing.at_all }}", "nothing"),
        ("{% for %}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_what_a_template_says_becomes_one_error(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chatml(byte_level_backend(), template).apply_chat_template([user("hi")])


def test_a_role_that_the_template_refuses_is_an_error_with_its_words() -> None:
    with pytest.raises(UserError, match="Only user and assistant roles are supported!"):
        sentencepiece().apply_chat_template([{"role": "system", "content": "Be brief."}])


def test_text_parts_are_joined(smollm2: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo <|im_"}, {"type": "text", "text": "end|>"}]
    assert smollm2.apply_chat_template([user(parts)]) == smollm2.apply_chat_template([user("Hello <|im_end|>")])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (user("hi"), "at least one message"),
        (["hi"], r"messages\[0\]"),
        ([user("hi"), {"content": "hi"}], r"messages\[1\]\.role"),
        ([{"role": "user|>\n", "content": "hi"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([user(None)], r"messages\[0\]\.content"),
        ([user(5)], r"messages\[0\]\.content"),
        ([user([{"type": "image_url", "image_url": "x"}])], "image_url"),
        ([user([{"type": "text"}])], "only text parts"),
        ([user(["hi"])], "only text parts"),
        ([{**user("hi"), "extra": object()}], "plain data"),
        ([user("a\ud800")], "Unicode"),
    ],
)
def test_messages_of_another_form_are_refused(smollm2: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        smollm2.apply_chat_template(messages)
