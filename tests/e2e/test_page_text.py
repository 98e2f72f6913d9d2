"""The page weighs and marks texts as tweet_svc does."""

import functools
import random
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import emoji
import pytest
import yaml
from playwright.sync_api import Browser, Page

from tests.e2e.conftest import ROOT
from tests.shared_data import shared_path
from tweet_svc import text

PIECES = [
    *(
        "http://",
        "t.co",
        "/",
        ".",
        "a.",
        "com",
        "é",
        "あ",
        "。",
        "@",
        "#",
        "_",
        "-",
        "rt",
        "\u0301",
        "example.com",
        "xn--",
    ),
    *("co.uk", "?q=1", "é.fr", ":80", "👩‍💻", "1\u20e3", "\ufe0f", "https://a.co/x(y)"),
]
EMOJI_NEW_TO_BROWSERS = 16.0
"""Unicode's version from which on a browser of last year may not know an emoji."""


def tlds_module() -> str:
    """What `web/tlds.js` must be; `python -m tests.e2e.test_page_text` writes it."""
    names = " ".join(sorted(text._TLDS))
    return f'''// Every top-level domain that tweet_svc knows; `python -m tests.e2e.test_page_text` writes this file.

export const TLDS =
  "{names}";
'''


def test_the_page_knows_the_top_level_domains_of_tweet_svc() -> None:
    assert (ROOT / "web/tlds.js").read_text() == tlds_module()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Page]:
    """A page of the folder's origin, without a mesh."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=ROOT / "web"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = chromium.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/icon.svg")
        yield page
    finally:
        server.shutdown()
        server.server_close()


def weights(page: Page, texts: list[str]) -> dict[str, int]:
    found = page.evaluate(
        "async texts => { const {weigh} = await import('/text.js'); return texts.map(weigh); }", texts
    )
    return dict(zip(texts, found, strict=True))


def expected(texts: list[str]) -> dict[str, int]:
    return {one: text.parse(one).weighted_length for one in texts}


def test_the_cases_from_the_field(page: Page) -> None:
    family = "👨‍👩‍👧‍👦"
    cases = {"👉": 2, "👩‍💻": 2, "👨🏾‍⚖️": 2, "💪🏻": 2, "🏳️‍🌈": 2, "Hi http://test.co": 26}
    cases |= {family * 140: 280, family * 141: 282, "😊" * 200: 400, "故" * 140: 280, "故" * 141: 282}
    assert weights(page, list(cases)) == cases


def test_twitter_texts_own_suite(page: Page) -> None:
    suites = [
        yaml.safe_load(shared_path(f"twitter-text/{name}.yml").read_text())["tests"] for name in ("validate", "extract")
    ]
    texts = [case["text"] for suite in suites for cases in suite.values() for case in cases]
    assert len(texts) > 200
    assert weights(page, texts) == expected(texts)


def test_every_emoji_and_what_people_type_around_links(page: Page) -> None:
    known = [one for one, data in emoji.EMOJI_DATA.items() if data["E"] < EMOJI_NEW_TO_BROWSERS]
    chance = random.Random(7)
    mixed = [
        "".join(chance.choices([*PIECES, " ", *chance.sample(known, 3)], k=chance.randint(1, 8))) for _ in range(2_000)
    ]
    texts = [*known, *mixed]
    assert weights(page, texts) == expected(texts)


if __name__ == "__main__":
    Path("web/tlds.js").write_text(tlds_module())
