"""The page and the operators' page in a real Chromium, on a mesh that runs as `make run` runs it."""

import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Route, expect

from mesh import principals
from mesh.principals import OPERATOR, Principal
from starling.graph.v1 import graph_pb2
from starling_client import Starling
from tests.e2e.conftest import RunningMesh
from tests.waiting import until

DELIVERED_SECONDS = 60.0
TWEETS = 1_000
SCROLLS_MAX = 400
HARMLESS = re.compile(r"Failed to load resource|net::ERR_INTERNET_DISCONNECTED")


@dataclass
class Person:
    """An account, with what calls as it."""

    handle: str
    user_id: int
    token: str
    calls: Starling

    def follow(self, other: "Person") -> None:
        self.calls.graph.Follow(graph_pb2.FollowRequest(followee_id=other.user_id))

    def home_ids(self) -> list[str]:
        return [str(item.item_id) for item in self.calls.home()]


class Stage:
    """A mesh, the people on it, and their browsers."""

    def __init__(self, mesh: RunningMesh, browser: Browser) -> None:
        self.mesh = mesh
        self.url = mesh.mesh.edge.rstrip("/")
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self._calls: list[Starling] = []
        self.complaints: list[str] = []

    def token(self, principal: Principal, seconds: float = 3_600) -> str:
        return principals.mint(self.mesh.folder.read_secrets().auth_secret, principal, seconds)

    def calls(self, token: str) -> Starling:
        at = self.mesh.mesh
        made = Starling(token=token, graph=at.graph, tweet=at.tweet, timeline=at.timeline)
        self._calls.append(made)
        return made

    def person(self, name: str) -> Person:
        """Somebody new, whose handle begins so."""
        handle = f"{name}_{uuid.uuid4().hex[:6]}"
        operator = self.calls(self.token(OPERATOR))
        user_id = operator.graph.CreateUser(graph_pb2.CreateUserRequest(handle=handle)).user.user_id
        token = self.token(principals.user(user_id))
        return Person(handle, user_id, token, self.calls(token))

    def page(self, path: str = "/", **options: Any) -> Page:
        """A page of a browser of its own. What it complains of is collected."""
        context = self._browser.new_context(**options)
        context.set_default_timeout(20_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._listen)
        page.goto(self.url + path)
        return page

    def _listen(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not HARMLESS.search(message.text):
            self.complaints.append(message.text)

    def signed_in(self, person: Person, **options: Any) -> Page:
        page = self.page(**options)
        sign_in(page, person.token)
        expect(page.get_by_role("heading", name="Home")).to_be_visible()
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        for calls in self._calls:
            calls.close()


@pytest.fixture
def stage(running_mesh: RunningMesh, chromium: Browser) -> Iterator[Stage]:
    stage = Stage(running_mesh, chromium)
    try:
        yield stage
    finally:
        stage.close()
    assert stage.complaints == []


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def cards(page: Page) -> Locator:
    return page.locator(".cards .tweet")


def ids(page: Page) -> list[str]:
    shown: list[str] = page.evaluate("() => [...document.querySelectorAll('.cards .tweet')].map(one => one.dataset.id)")
    return shown


def write(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="New tweet").fill(text)
    page.locator("main").get_by_role("button", name="Tweet", exact=True).click()


def choose(page: Page, card: Locator, action: str, entry: str) -> None:
    card.get_by_role("button", name=action).click()
    page.get_by_role("dialog").get_by_role("button", name=entry).click()


def scroll_to_the_end(page: Page, meanwhile: Callable[[int], object] = lambda step: None) -> None:
    for step in range(SCROLLS_MAX):
        meanwhile(step)
        shown = cards(page).count()
        page.mouse.wheel(0, 20_000)
        page.wait_for_function(
            "shown => document.querySelectorAll('.cards .tweet').length > shown || document.querySelector('.all')",
            arg=shown,
        )
        if page.get_by_text("That is all.").is_visible():
            return
    raise AssertionError("the timeline doesn't end")


def post_many(authors: list[Person], count: int, reader: Person) -> list[int]:
    """Tweets by several people at once, and all that their reader has; their ids, newest first."""
    with ThreadPoolExecutor(8) as pool:
        posted = pool.map(lambda number: authors[number % len(authors)].calls.post(f"Number {number}"), range(count))
        tweet_ids = sorted((one.tweet.tweet_id for one in posted), reverse=True)
    until(lambda: {*map(str, tweet_ids)} <= {*reader.home_ids()}, DELIVERED_SECONDS)
    return tweet_ids


def is_live(page: Page) -> None:
    expect(page.locator(".live")).to_have_text("Live")


def test_a_tweet_arrives_live_and_is_the_first_after_a_reload(stage: Stage) -> None:
    anne, bert = stage.person("anne"), stage.person("bert")
    reader, writer = stage.signed_in(anne), stage.signed_in(bert)
    reader.goto(f"{stage.url}/#/@{bert.handle}")
    reader.get_by_role("button", name=f"Follow @{bert.handle}").click()
    expect(reader.get_by_role("button", name=f"Unfollow @{bert.handle}")).to_be_visible()
    reader.get_by_role("link", name="Home", exact=True).click()
    is_live(reader)

    text = "<img src=x onerror=alert(1)> & <b>bold</b>"
    write(writer, text)
    expect(cards(writer).first.locator(".text")).to_have_text(text)
    reader.get_by_role("button", name="1 new tweet").click()
    expect(cards(reader).first.locator(".text")).to_have_text(text)
    assert reader.locator(".text img, .text b").count() == 0
    reader.reload()
    expect(cards(reader).first.locator(".text")).to_have_text(text)
    with writer.expect_request(lambda request: f"readYourWriteToken={ids(reader)[0]}" in request.url):
        writer.reload()
    expect(cards(writer)).to_have_count(1)
    assert ids(reader) == ids(writer) == anne.home_ids()


def test_a_thousand_tweets_scroll_by_without_a_repeat_or_a_hole(stage: Stage) -> None:
    reader = stage.person("reader")
    authors = [stage.person(f"author{number}") for number in range(3)]
    for author in authors:
        reader.follow(author)
    tweet_ids = post_many(authors, TWEETS, reader)
    page = stage.signed_in(reader)
    is_live(page)
    late: list[int] = []

    def meanwhile(step: int) -> None:
        if step in (3, 7):
            late.append(authors[0].calls.post(f"Meanwhile, {step}").tweet.tweet_id)

    scroll_to_the_end(page, meanwhile)
    assert ids(page) == [str(one) for one in tweet_ids]
    page.get_by_role("button", name="2 new tweets").click()
    expect(cards(page)).to_have_count(TWEETS + 2)
    assert ids(page) == [str(one) for one in (*reversed(late), *tweet_ids)] == reader.home_ids()


def test_after_a_long_absence_the_home_is_read_anew(stage: Stage) -> None:
    reader, author = stage.person("reader"), stage.person("author")
    reader.follow(author)
    old = author.calls.post("Known before").tweet.tweet_id
    page = stage.signed_in(reader)
    is_live(page)
    page.context.set_offline(True)
    expect(page.get_by_text("You are offline")).to_be_visible()
    tweet_ids = post_many([author], 600, reader)
    page.context.set_offline(False)
    page.get_by_role("button", name="Many new tweets").click()
    expect(cards(page).first).to_have_attribute("data-id", str(tweet_ids[0]))
    scroll_to_the_end(page)
    assert ids(page) == [str(one) for one in (*tweet_ids, old)]


def test_an_edit_its_history_a_deletion_and_a_block_are_seen(stage: Stage) -> None:
    anne, bert = stage.person("anne"), stage.person("bert")
    anne.follow(bert)
    kept, gone = (bert.calls.post(text).tweet.tweet_id for text in ("It is five", "To be deleted"))
    reader, writer = stage.signed_in(anne), stage.signed_in(bert)
    edited, deleted = (writer.locator(f".cards [data-id='{one}']") for one in (kept, gone))

    choose(writer, edited, "More", "Edit")
    editor = writer.get_by_role("dialog")
    editor.get_by_role("textbox").fill("It is six")
    editor.get_by_role("button", name="Save").click()
    expect(edited.locator(".text")).to_have_text("It is six")
    choose(writer, deleted, "More", "Delete")
    writer.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(deleted).to_have_count(0)

    reader.reload()
    card = reader.locator(f".cards [data-id='{kept}']")
    expect(card.locator(".text")).to_have_text("It is six")
    expect(reader.locator(f"[data-id='{gone}']")).to_have_count(0)
    card.get_by_role("button", name="edited").click()
    expect(reader.get_by_role("dialog").locator(".text")).to_have_text(["It is six", "It is five"])
    reader.keyboard.press("Escape")

    choose(reader, card, "More", "Block")
    reader.get_by_role("dialog").get_by_role("button", name="Block").click()
    expect(card).to_have_count(0)
    reader.reload()
    expect(reader.get_by_text("Nothing here yet")).to_be_visible()
    reader.goto(f"{stage.url}/#/@{bert.handle}")
    expect(reader.get_by_role("heading", name=f"You block @{bert.handle}")).to_be_visible()
    reader.get_by_role("button", name="Unblock").click()
    expect(cards(reader)).to_have_count(1)


def test_offline_nothing_is_lost_and_back_nothing_is_twice(stage: Stage) -> None:
    anne, bert = stage.person("anne"), stage.person("bert")
    anne.follow(bert)
    page = stage.signed_in(anne)
    is_live(page)
    page.context.set_offline(True)
    expect(page.get_by_text("You are offline")).to_be_visible()
    write(page, "Written in a tunnel")
    expect(page.get_by_text("Not sent")).to_be_visible()
    came = [bert.calls.post(f"While you were away, {number}").tweet.tweet_id for number in range(2)]
    page.context.set_offline(False)
    expect(page.get_by_role("button", name="2 new tweets")).to_be_visible()
    expect(cards(page).locator(".text")).to_have_text(["Written in a tunnel"])
    expect(page.get_by_text("Not sent")).to_have_count(0)
    page.get_by_role("button", name="2 new tweets").click()
    expect(cards(page)).to_have_count(3)
    assert ids(page) == anne.home_ids()
    assert set(map(str, came)) < set(ids(page))


def test_a_post_whose_answers_are_lost_is_there_once(stage: Stage) -> None:
    anne = stage.person("anne")
    page = stage.signed_in(anne)
    is_live(page)
    sent: list[str | None] = []

    def lose_three_answers(route: Route) -> None:
        sent.append(route.request.header_value("idempotency-key"))
        route.fetch()
        route.continue_() if len(sent) > 3 else route.abort()

    page.route("**/api/v1/tweets", lose_three_answers)
    write(page, "Said once")
    page.get_by_role("button", name="Send again").click()
    expect(page.locator(".on-its-way")).to_have_count(0)
    expect(cards(page).locator(".text")).to_have_text(["Said once"])
    assert len(sent) == 4
    assert len(set(sent)) == 1
    assert len(anne.home_ids()) == 1


def test_what_was_written_outlives_a_reload_and_a_session(stage: Stage) -> None:
    anne = stage.person("anne")
    page = stage.page()
    sign_in(page, stage.token(principals.user(anne.user_id), 4))
    box = page.get_by_role("textbox", name="New tweet")
    box.fill("Half a thought")
    expect(page.get_by_text("Your session is over")).to_be_visible()
    sign_in(page, anne.token)
    expect(box).to_have_value("Half a thought")
    page.reload()
    expect(box).to_have_value("Half a thought")
    page.locator("main").get_by_role("button", name="Tweet", exact=True).click()
    expect(cards(page).locator(".text")).to_have_text(["Half a thought"])
    expect(box).to_have_value("")


def test_a_tweet_too_heavy_is_not_sent(stage: Stage) -> None:
    page = stage.signed_in(stage.person("anne"))
    button = page.locator("main").get_by_role("button", name="Tweet", exact=True)
    box = page.get_by_role("textbox", name="New tweet")
    for text, weight, enabled in (
        ("", 0, False),
        ("故" * 140, 280, True),
        ("故" * 141, 282, False),
        ("👩‍💻 example.com", 26, True),
    ):
        box.fill(text)
        expect(page.locator(".home .counter")).to_have_attribute("data-weight", str(weight))
        expect(button).to_be_enabled() if enabled else expect(button).to_be_disabled()


def test_like_retweet_and_reply_by_keyboard(stage: Stage) -> None:
    anne, bert = stage.person("anne"), stage.person("bert")
    anne.follow(bert)
    tweet_id = bert.calls.post("Answer me").tweet.tweet_id
    page = stage.signed_in(anne)
    card = page.locator(f"[data-id='{tweet_id}']")
    expect(card).to_be_visible()
    page.keyboard.press("j")
    expect(card).to_be_focused()
    page.keyboard.press("l")
    expect(card.get_by_role("button", name="Unlike, 1")).to_be_visible()
    page.keyboard.press("t")
    page.get_by_role("dialog").get_by_role("button", name="Retweet").click()
    expect(card.get_by_role("button", name="Undo the retweet, 1")).to_be_visible()
    card.focus()
    page.keyboard.press("r")
    page.get_by_role("dialog").get_by_role("textbox").fill("Gladly")
    page.keyboard.press("Control+Enter")
    reply = cards(page).first
    expect(reply.locator(".text")).to_have_text("Gladly")
    expect(reply).to_contain_text(f"Replying to @{bert.handle}")
    page.reload()
    expect(card.get_by_role("button", name="Unlike, 1")).to_be_visible()
    card.focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{stage.url}/#/tweet/{tweet_id}")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()


def test_operators_see_what_workers_do_and_when_nobody_answers(stage: Stage) -> None:
    author = stage.person("author")
    for _ in range(2):
        stage.person("reader").follow(author)
    page = stage.page("/ops")
    sign_in(page, author.token)
    expect(page.get_by_text("isn't an operator's")).to_be_visible()
    sign_in(page, stage.token(OPERATOR))
    expect(page.locator(".fresh")).to_have_text("Live")
    expect(page.get_by_role("region", name="Lag", exact=True)).to_contain_text("0 s")
    delivered = page.locator("tbody tr td").nth(1)
    expect(delivered).to_be_visible()
    before = int(delivered.inner_text().replace(",", ""))
    author.calls.post("Count me")
    page.wait_for_function(
        "before => Number(document.querySelectorAll('tbody td')[1].textContent.replace(',', '')) > before", arg=before
    )
    pulled = page.get_by_role("region", name="Authors pulled now").locator(".value")
    expect(pulled).to_have_text("0")
    for threshold, now in (("2", "1"), ("50000", "0")):
        page.get_by_label("Pull authors from").fill(threshold)
        page.get_by_role("button", name="Set").click()
        page.get_by_role("dialog").get_by_role("button", name="Set").click()
        expect(pulled).to_have_text(now)
    expect(page.get_by_role("region", name="Authors are pulled from")).to_contain_text("50,000")
    page.context.set_offline(True)
    expect(page.locator(".fresh")).to_contain_text("what you see is old")
    page.context.set_offline(False)
    expect(page.locator(".fresh")).to_have_text("Live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_stands_in_the_way_of_assistive_technology(stage: Stage, scheme: str) -> None:
    anne, bert = stage.person("anne"), stage.person("bert")
    anne.follow(bert)
    tweet_id = bert.calls.post("Look at https://example.com, @nobody").tweet.tweet_id
    violations: list[str] = []

    def look(page: Page, ready: Callable[[], object]) -> None:
        ready()
        report = Axe().run(page)
        if report.violations_count:
            violations.append(f"{page.url}: {report.generate_report()}")

    page = stage.page(color_scheme=scheme)
    look(page, lambda: expect(page.get_by_role("heading", name="Sign in")).to_be_visible())
    sign_in(page, anne.token)
    look(page, lambda: expect(cards(page)).to_have_count(1))
    for place in (f"@{bert.handle}", f"tweet/{tweet_id}", "hidden"):
        page.goto(f"{stage.url}/#/{place}")
        look(page, lambda: expect(page.locator("main .bar h1")).not_to_have_text("Home"))
    page.keyboard.press("n")
    look(page, lambda: expect(page.get_by_role("dialog")).to_be_visible())
    ops = stage.page("/ops", color_scheme=scheme)
    sign_in(ops, stage.token(OPERATOR))
    look(ops, lambda: expect(ops.locator("tbody tr")).to_have_count(1))
    assert not violations, "\n".join(violations)


def test_it_fits_a_phone(stage: Stage) -> None:
    anne = stage.person("anne")
    anne.calls.post("wide" * 70)
    page = stage.signed_in(anne, viewport={"width": 320, "height": 640}, has_touch=True)
    expect(cards(page)).to_have_count(1)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 320
    page.get_by_role("navigation").get_by_role("button", name="Tweet").click()
    expect(page.get_by_role("dialog").get_by_role("textbox")).to_be_focused()
