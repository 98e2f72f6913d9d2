"""The model test's own Valkey: its rules drop all data."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.model.reference
import timeline_svc.core
import timeline_svc.reader
import timeline_svc.sources
from tests.conftest import running_valkey
from tests.model.machine import World


class Complaints(logging.Handler):
    """Keeps errors that are logged."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        self._complaints.append(record.getMessage())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with running_valkey(tmp_path) as url, asyncio.Runner() as runner:
        one = World(runner, url)
        handler = Complaints(one.complaints)
        logging.getLogger().addHandler(handler)
        yield one
        logging.getLogger().removeHandler(handler)


@pytest.fixture
def small_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bound of timeline_svc is met by a handful of tweets."""
    monkeypatch.setattr(timeline_svc.core, "COVER_MAX", 2)
    monkeypatch.setattr(timeline_svc.core, "EXAMINED_MAX", 9)
    monkeypatch.setattr(timeline_svc.core, "BATCH_MAX", 3)
    monkeypatch.setattr(timeline_svc.core, "RETWEETS_REMEMBERED", 2)
    monkeypatch.setattr(tests.model.reference, "RETWEETS_REMEMBERED", 2)
    monkeypatch.setattr(timeline_svc.reader, "_READ_AHEAD", 1)
    monkeypatch.setattr(timeline_svc.reader, "_BLOCKERS_MAX", 1)
    monkeypatch.setattr(timeline_svc.sources, "_STORE_FIRST", 2)
    monkeypatch.setattr(timeline_svc.sources, "_STORE_MOST", 4)
    monkeypatch.setattr(timeline_svc.sources, "_OPENED_AT_ONCE", 1)
    monkeypatch.setattr(timeline_svc.sources, "_PASSED_MAX", 1)
