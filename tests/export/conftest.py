"""Fixtures of the exporter's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def old(tiny_checkpoint, tmp_path) -> Path:
    """A bundle that stands already, alone in its folder."""
    from specedge.export.pipeline import export
    from specedge.tests.export.bundles import QUICK

    folder = tmp_path / "home" / "bundle"
    export(str(tiny_checkpoint), folder, QUICK)
    return folder
