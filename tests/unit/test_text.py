"""Texts weigh, mention and tag as twitter-text has it; case tables T1 (weights) and X3 (mentions)."""

import unicodedata
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.shared_data import shared_path
from tweet_svc.text import (
    MAX_CODE_POINTS,
    MAX_WEIGHTED_LENGTH,
    extract_hashtags,
    extract_mentions,
    invalid_reason,
    parse,
)

FAMILY = "👨‍👩‍👧‍👦"

# Any str, so lone surrogates as well; and what the rules are about, which chance would hardly meet.
PIECES = [
    "http://",
    "t.co",
    "/",
    "a.",
    "com",
    "é",
    "あ",
    "。",
    "@",
    "#",
    "_",
    "-",
    "xn--",
    "rt",
    FAMILY,
    "\ufe0f",
    "\u0301",
]
ANY_TEXT = st.text(st.characters(codec=None)) | st.lists(st.sampled_from(PIECES)).map("".join)


def suite_cases(file: str, section: str) -> list[Any]:
    """A section of twitter-text's conformance suite, as parameters; one that is skipped if it's missing."""
    try:
        path = shared_path(f"twitter-text/{file}")
    except pytest.skip.Exception as missing:
        return [pytest.param(None, marks=pytest.mark.skip(str(missing)))]
    cases = yaml.safe_load(path.read_text("utf-8"))["tests"][section]
    return [pytest.param(case, id=case["description"]) for case in cases]


@pytest.mark.parametrize(
    "case",
    [
        *suite_cases("validate.yml", "WeightedTweetsWithDiscountedEmojiCounterTest"),
        *suite_cases("validate.yml", "UnicodeDirectionalMarkerCounterTest"),
    ],
)
def test_a_text_is_weighed_as_the_twitter_text_suite_says(case: dict[str, Any]) -> None:
    parsed = parse(case["text"])
    assert case["expected"] == {
        "weightedLength": parsed.weighted_length,
        "valid": parsed.valid,
        "permillage": parsed.permillage,
        "displayRangeStart": parsed.display_range[0],
        "displayRangeEnd": parsed.display_range[1],
        "validRangeStart": parsed.valid_range[0],
        "validRangeEnd": parsed.valid_range[1],
    }


@pytest.mark.parametrize("case", suite_cases("extract.yml", "mentions"))
def test_mentions_are_those_the_twitter_text_suite_says(case: dict[str, Any]) -> None:
    assert extract_mentions(case["text"]) == case["expected"]


@pytest.mark.parametrize("case", suite_cases("extract.yml", "mentions_with_indices"))
def test_mentions_have_the_names_of_the_suite_with_indices(case: dict[str, Any]) -> None:
    assert extract_mentions(case["text"]) == [mention["screen_name"] for mention in case["expected"]]


@pytest.mark.parametrize(
    "case",
    [*suite_cases("extract.yml", "hashtags"), *suite_cases("extract.yml", "hashtags_from_astral")],
)
def test_hashtags_are_those_the_twitter_text_suite_says(case: dict[str, Any]) -> None:
    assert extract_hashtags(case["text"]) == case["expected"]


@pytest.mark.parametrize(
    "case",
    [
        *suite_cases("extract.yml", "urls"),
        *suite_cases("extract.yml", "urls_with_directional_markers"),
        *suite_cases("extract.yml", "tco_urls_with_params"),
    ],
)
def test_each_url_of_the_twitter_text_suite_weighs_23_and_the_rest_by_character(case: dict[str, Any]) -> None:
    urls = [url if isinstance(url, str) else url["url"] for url in case["expected"]]
    rest = case["text"]
    for url in urls:
        rest = rest.replace(url, "", 1)
    assert parse(case["text"]).weighted_length == 23 * len(urls) + sum(1 if char < "\u1100" else 2 for char in rest)


@pytest.mark.parametrize(
    ("text", "weight", "is_accepted"),
    [
        ("👉", 2, True),
        ("👩‍💻", 2, True),
        ("👨🏾‍⚖️", 2, True),
        ("💪🏻", 2, True),
        ("🏳️‍🌈", 2, True),
        (FAMILY, 2, True),
        (FAMILY * 140, 280, True),
        (FAMILY * 141, 282, False),
        ("😊" * 200, 400, False),
        ("故" * 140, 280, True),
        ("故" * 141, 282, False),
        ("Hi http://test.co", 26, True),
    ],
)
def test_t1_a_text_of_up_to_280_by_weight_is_accepted(text: str, weight: int, is_accepted: bool) -> None:
    parsed = parse(text)
    assert (parsed.weighted_length, parsed.valid) == (weight, is_accepted)
    assert (invalid_reason(text) is None) == is_accepted


def test_t1_an_accepted_text_may_have_3500_bytes() -> None:
    assert len((FAMILY * 140).encode()) == 3500


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("の@usernameに", ["username"]),
        ("@username email me @test@example.com", ["username"]),
        ("f@@kn", []),
        ("@a @A @a", ["a", "A", "a"]),
        ("@user/list", []),
        ("@" + "x" * 21, ["x" * 20]),
    ],
)
def test_x3_only_free_standing_at_signs_mention(text: str, names: list[str]) -> None:
    assert extract_mentions(text) == names


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("#a#b #c://d ##e &#f", ["e"]),
        ("#️⃣ #⃣", []),
        ("#a\ufe0f#b", []),
        ("see example.com/#path #あexample.com", ["あexample"]),
    ],
)
def test_a_hashtag_is_none_within_a_url_a_keycap_or_next_to_another(text: str, tags: list[str]) -> None:
    assert extract_hashtags(text) == tags


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("t.co/abc", 23),
        ("T.CO", 23),
        ("is it example.co.za?", 30),
        ("wait...what.is.no-tld", 21),
        ("me@example.com", 14),
        ("example.com/a_(b_(c))!", 24),
        ("École.fr", 24),
        ("© ® ™", 6),
        ("©️ 1️⃣ 1 🇩🇪 🇦🇦", 15),
        ("😀\u200d😀", 5),
    ],
)
def test_links_weigh_23_and_emoji_2_but_what_looks_like_them_does_not(text: str, weight: int) -> None:
    assert parse(text).weighted_length == weight


def test_a_url_of_over_4096_characters_weighs_as_text() -> None:
    assert parse("http://a.co/" + "x" * 4077).weighted_length == 23
    assert parse("http://a.co/" + "x" * 4078).weighted_length == 4090


def test_the_text_that_is_kept_is_in_nfc_and_ranges_are_those_of_the_text_given() -> None:
    parsed = parse("e\u0301" * 281)
    assert parsed.text == "é" * 281
    assert (parsed.display_range, parsed.valid_range) == ((0, 561), (0, 560))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "blank"),
        (" \n\u3000", "blank"),
        ("a" * 281, "weighted length of 281"),
        ("a\ufffe", "U+FFFE"),
        ("\ufeffa", "U+FEFF"),
        ("a\uffff", "U+FFFF"),
        ("a\0", "U+0000"),
        ("a\ud83d", "U+D83D"),
        ("a" * (MAX_CODE_POINTS + 1), "more than 25000 characters"),
        ("a" + "\u0301\u0316" * 150, "weighted length of 301"),
    ],
)
def test_a_refused_text_is_told_why(text: str, reason: str) -> None:
    assert reason in (invalid_reason(text) or "accepted")


def test_a_text_too_large_to_scan_has_no_links_nor_mentions_nor_hashtags() -> None:
    text = "http://t.co @a #a " * 2000
    assert parse(text).weighted_length == len(text) > MAX_CODE_POINTS
    assert extract_mentions(text) == extract_hashtags(text) == []


# These are here to be run at all: a pattern that backtracks over them would hold the suite up until its
# time-out. That work is linear is by construction, which the module says, and is not measured.
@pytest.mark.parametrize(
    "unit",
    [
        "a.",
        "@",
        "#",
        "http://",
        "a.com/",
        "a.com/(",
        "a.com/!",
        "é.",
        "é_",
        "xn--",
        "a.xn--",
        "#あ",
        "rt@",
        "\u0301\u0316",
    ],
)
def test_a_text_made_to_be_slow_is_refused_like_any_other(unit: str) -> None:
    text = (unit * 20_000)[:20_000]
    assert invalid_reason(text)
    assert extract_mentions(text) == []
    assert len(extract_hashtags(text)) <= 10_000


@given(ANY_TEXT)
def test_any_text_gets_a_verdict_and_what_is_accepted_is_valid(text: str) -> None:
    parsed = parse(text)
    assert parsed.valid or parsed.invalid_reason
    assert (parsed.weighted_length > MAX_WEIGHTED_LENGTH) == (parsed.permillage > 1000)
    assert 0 <= parsed.valid_range[1] <= parsed.display_range[1] or not unicodedata.is_normalized("NFC", text)


@given(ANY_TEXT)
def test_a_kept_text_is_weighed_as_the_given_one_was(text: str) -> None:
    parsed = parse(text)
    again = parse(parsed.text)
    assert (again.text, again.weighted_length, again.valid) == (
        parsed.text,
        parsed.weighted_length,
        parsed.valid,
    )


@given(ANY_TEXT, st.integers(0, 9))
def test_each_plain_cjk_letter_at_the_end_adds_2(text: str, count: int) -> None:
    assert parse(text + "故" * count).weighted_length == parse(text).weighted_length + 2 * count


@given(ANY_TEXT)
def test_what_is_mentioned_or_tagged_stands_in_the_text(text: str) -> None:
    assert all(f"@{name}" in text.replace("＠", "@") for name in extract_mentions(text))
    assert all(f"#{tag}" in text.replace("＃", "#") for tag in extract_hashtags(text))
