"""The tiny model that chats run on."""

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), with_tokenizer=True)
