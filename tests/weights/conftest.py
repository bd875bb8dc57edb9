from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes], Path]:
    """Write bytes to a file of a neutral name."""
    def save_bytes(content: bytes) -> Path:
        path = tmp_path / "model.bin"
        path.write_bytes(content)
        return path

    return save_bytes
