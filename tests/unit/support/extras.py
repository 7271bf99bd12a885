"""Tests of an optional package: skipped without it, and nothing of it is imported while tests are collected."""

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
