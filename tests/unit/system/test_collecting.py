"""Importing without the garbage collector."""

from __future__ import annotations

import gc

import pytest

from slurmft.system.processes import without_collections


def test_the_collector_is_on_again_also_after_an_error_and_leaves_the_imported_alone():
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), without_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
