"""Imported before any test imports torch, so that the package's settings for threads hold."""

import transcribe  # noqa: F401

import pocket  # isort: skip
import pytest


@pytest.fixture(scope="session")
def vocabulary():
    """The pocket models' spoken words."""
    return pocket.read_vocabulary()
