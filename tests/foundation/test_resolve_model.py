"""What ``--model`` may name, and what a download takes: no network, the hub's client is replaced or offline."""

from pathlib import Path
from typing import Any

import pytest

from minipaged.errors import UserError
from minipaged.foundation.weights import resolve_model


def test_a_folder_is_taken_as_it_is_and_other_local_names_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    assert resolve_model(folder) == resolve_model(str(folder)) == folder
    with pytest.raises(UserError, match="revision 'main' applies to models of the Hugging Face hub"):
        resolve_model(str(folder), revision="main")
    with pytest.raises(UserError, match="there is no folder"):
        resolve_model(str(folder / "nothing"))
    with pytest.raises(UserError, match="is a single file; give a folder"):
        resolve_model(str(folder / "model.safetensors"))
    with pytest.raises(UserError, match=r"other\.gguf is a single file"):
        resolve_model("other.gguf")


def test_a_hub_model_that_cannot_be_reached_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="nobody/nothing is no local folder, and could not be fetched") as refusal:
        resolve_model("nobody/nothing")
    assert "\n" not in str(refusal.value)


def hub_error(name: str) -> Exception:
    from huggingface_hub import errors

    # Without __init__, which wants a response object of whichever HTTP library the client uses.
    error_class = getattr(errors, name)
    return error_class.__new__(error_class, "several\nlines")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", "some/model is neither a local folder nor a public repository"),
        ("GatedRepoError", "some/model asks for consent on its page first"),
        ("RevisionNotFoundError", "some/model has no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_sentence(
    error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise hub_error(error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=message) as refusal:
        resolve_model("some/model", revision="v9")
    assert "\n" not in str(refusal.value)


def test_a_download_takes_weights_settings_and_tokenizer_and_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **options: asked.update(options, name=name) or str(tmp_path),
    )
    lines: list[str] = []
    assert resolve_model("some/model", revision="v1", show_progress=lines.append) == tmp_path
    assert (asked["name"], asked["revision"]) == ("some/model", "v1")
    assert lines == ["fetching some/model from the Hugging Face hub"]
    wanted = [
        *(
            "model-00001-of-00002.safetensors",
            "config.json",
            "model.safetensors.index.json",
            "tokenizer.json",
        ),
        *("tokenizer.model", "chat_template.jinja", "vocab.json", "merges.txt"),
    ]
    unwanted = [
        *("modeling_custom.py", "pytorch_model.bin", "model.gguf", "consolidated.safetensors", "README.md"),
        *("original/model.safetensors", "onnx/config.json"),
    ]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + unwanted, **patterns)) == wanted
