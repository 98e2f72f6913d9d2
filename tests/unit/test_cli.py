"""Parts of the command line that need no mesh."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import recent_posts
from cli.app import safe
from cli.client import Client, GivenToken, Minting, NotPossibleError, Targets, pages
from cli.importing import EdgeFile, EdgeFileError, import_graph
from cli.recent_posts import RecentPosts
from mesh import principals

SECRET = "a secret for tests that is long enough"


def edges(tmp_path: Path, text: str, *, undirected: bool = False) -> list[tuple[int, int]]:
    file = tmp_path / "edges"
    file.write_text(text)
    return list(EdgeFile(file, undirected=undirected))


def test_an_edge_list_has_two_numbers_a_line_and_comments(tmp_path: Path) -> None:
    text = "# one\n%two\n\n1 2\n\t3   4  \n007 2\n"
    assert edges(tmp_path, text) == [(1, 2), (3, 4), (7, 2)]
    assert edges(tmp_path, "1 2\n", undirected=True) == [(1, 2), (2, 1)]


@pytest.mark.parametrize("line", ["1", "1 2 3", "a b", "-1 2", "1 2.5", "1 ²", "1 " + "9" * 5_000])
def test_a_line_that_is_no_edge_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(EdgeFileError, match=r"edges:2: expected two numbers"):
        edges(tmp_path, f"1 2\n{line}\n")


def test_a_label_makes_a_handle(tmp_path: Path) -> None:
    assert edges(tmp_path, "99999999999999 1") == [(99_999_999_999_999, 1)]
    with pytest.raises(EdgeFileError, match="at most 14 digits"):
        edges(tmp_path, "100000000000000 1")


async def test_an_import_reads_its_edges_twice() -> None:
    async with Client(Targets(), Minting(SECRET)) as client:
        with pytest.raises(TypeError, match="read twice"):
            await import_graph(client, iter([(1, 2)]))


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert safe("a\x1b[31mred\x9b\r\nnext 👩‍👩‍👧") == "a�[31mred��\nnext 👩‍👩‍👧"


def test_recent_posts_are_remembered_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_posts, "_AUTHORS_MAX", 4)
    monkeypatch.setattr(recent_posts, "_SWEEP_TO", 2)
    posts = RecentPosts(tmp_path)
    assert posts.token(1) == ""
    for author in range(1, 6):
        posts.remember(author, f"token {author}")
        os.utime(tmp_path / "recent-posts" / str(author), (author, author))
    posts.remember(5, "newer")
    assert [posts.token(author) for author in range(1, 6)] == ["", "", "", "token 4", "newer"]


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    posts = RecentPosts(tmp_path / "file")
    posts.remember(1, "token")
    assert posts.token(1) == ""


def test_a_given_token_speaks_only_for_its_user() -> None:
    identity = GivenToken(principals.mint(SECRET, principals.user(5)))
    assert identity.metadata(principals.user(5)) == identity.metadata(principals.OPERATOR)
    with pytest.raises(NotPossibleError, match="speaks for user:5, not for user:6"):
        identity.metadata(principals.user(6))
    with pytest.raises(NotPossibleError, match="isn't a token"):
        GivenToken("nonsense")


async def test_short_and_empty_pages_do_not_end_a_walk() -> None:
    answers: Iterator[tuple[list[int], str]] = iter([([1, 2], "a"), ([], "b"), ([3], "")])
    asked: list[str] = []

    async def page(token: str) -> tuple[list[int], str]:
        asked.append(token)
        return next(answers)

    assert [items async for items, _ in pages(page)] == [[1, 2], [], [3]]
    assert asked == ["", "a", "b"]
