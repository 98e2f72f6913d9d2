"""The SQLite database: group commit, and snapshots."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from mesh.errors import ConfigurationError, UnavailableError
from mesh.sqlite import Database, key


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database(tmp_path / "test.db", "CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)", synchronous="OFF")
    await opened.open()
    yield opened
    await opened.close()


def insert(connection: sqlite3.Connection, number: int) -> int:
    connection.execute("INSERT INTO t VALUES (?)", (number,))
    return number


async def numbers(database: Database) -> list[int]:
    return await database.read(lambda connection: [row[0] for row in connection.execute("SELECT n FROM t")])


async def test_writes_that_wait_together_are_all_stored(database: Database) -> None:
    writes = [database.write(partial(insert, number=n)) for n in range(500)]
    assert await asyncio.gather(*writes) == list(range(500))
    assert await numbers(database) == list(range(500))


async def test_a_write_that_fails_is_undone_alone(database: Database) -> None:
    def half(connection: sqlite3.Connection) -> None:
        insert(connection, 1)
        raise ValueError("half-way")

    writes = [
        database.write(lambda connection: insert(connection, 0)),
        database.write(half),
        database.write(lambda connection: insert(connection, 2)),
    ]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [int, ValueError, int]
    assert await numbers(database) == [0, 2]


async def test_a_read_cannot_write(database: Database) -> None:
    with pytest.raises(UnavailableError):
        await database.read(lambda connection: insert(connection, 1))


async def test_a_broken_file_is_unavailable(tmp_path: Path) -> None:
    nowhere = Database(tmp_path / "no" / "such" / "folder.db", "")
    with pytest.raises(UnavailableError):
        await nowhere.open()


async def test_what_is_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    for expected in ([], [5]):
        database = Database(tmp_path / "kept.db", "CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)")
        await database.open()
        assert await numbers(database) == expected
        if not expected:
            await database.write(lambda connection: insert(connection, 5))
        await database.close()


def test_ids_beyond_63_bits_are_nobodys() -> None:
    assert key(5) == 5
    assert key(2**64 - 1) == key(2**63) == 2**63 - 1


async def test_a_start_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    database = Database(folder / "test.db", "CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)")
    with pytest.raises(UnavailableError):
        await database.open()
    folder.mkdir()
    await database.open()
    await database.open()
    await database.write(lambda connection: insert(connection, 5))
    assert await numbers(database) == [5]
    await database.close()


async def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "poem.db").write_text("no database, " * 100)
    with pytest.raises(ConfigurationError, match=r"poem\.db"):
        await Database(tmp_path / "poem.db", "").open()


async def test_an_older_file_is_brought_up_to_date_step_by_step(tmp_path: Path) -> None:
    steps = ("ALTER TABLE t ADD COLUMN m INTEGER NOT NULL DEFAULT 0;", "UPDATE t SET m = n * 2")
    schemas = ("(n INTEGER PRIMARY KEY)", *["(n INTEGER PRIMARY KEY, m INTEGER NOT NULL DEFAULT 0)"] * 2)
    for releases in ([0, 2], [0, 1, 2], [0, 0, 1, 1, 2, 2]):
        path = tmp_path / f"{len(releases)}.db"
        for number, release in enumerate(releases):
            schema = f"CREATE TABLE IF NOT EXISTS t {schemas[release]}"
            database = Database(path, schema, migrations=steps[:release], synchronous="OFF")
            await database.open()
            await database.open()
            if number == 0:
                await database.write(partial(insert, number=5))
            else:
                assert await numbers(database) == [5]
            await database.close()
        with sqlite3.connect(path) as connection:
            assert connection.execute("SELECT n, m FROM t").fetchall() == [(5, 10)]


async def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    for step in ("CREATE TABLE u (n INTEGER); ALTER TABLE missing RENAME TO v", "CREATE TABLE u (n INTEGER)"):
        migrations = (step,)
        database = Database(tmp_path / "test.db", "CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)")
        await database.open()
        await database.close()
        newer = Database(tmp_path / "test.db", "", migrations=migrations)
        if "missing" in step:
            with pytest.raises(UnavailableError):
                await newer.open()
        else:
            await newer.open()
        await newer.close()


async def test_a_file_of_a_newer_release_is_refused_by_name(tmp_path: Path) -> None:
    newer = Database(tmp_path / "test.db", "CREATE TABLE t (n INTEGER)", migrations=("one", "two"))
    await newer.open()
    await newer.close()
    older = Database(tmp_path / "test.db", "CREATE TABLE IF NOT EXISTS t (n INTEGER)", migrations=("one",))
    with pytest.raises(ConfigurationError, match=r"test\.db was made by a newer release"):
        await older.open()
