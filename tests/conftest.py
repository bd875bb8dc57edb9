"""Imported before any test imports torch, so that the package's settings for threads hold."""

import transcribe  # noqa: F401
