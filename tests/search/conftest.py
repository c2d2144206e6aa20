"""The simulated world as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "log.sqlite", monkeypatch)
