"""What a tweet's text weighs, and whom and what it names, by twitter-text's rules (config v3).

Source of the rules: twitter-text 3.1.0, whose conformance suite the tests run. Top-level domains
are those of the Public Suffix List in `publicsuffixlist`, emoji sequences those of `emoji`; both
are read from the packages once, at import. Nothing else here does I/O, nor looks at a clock.

Work is linear in the text's length, whatever the text: a pattern here repeats one class of
characters and gives back the end of it once at most, and host names, over which twitter-text's own
pattern backtracks (`a.a.a.…`), are found in one walk over their labels. Texts over
`MAX_CODE_POINTS` are not scanned at all.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby, pairwise

import emoji

MAX_WEIGHTED_LENGTH = 280
MAX_CODE_POINTS = 25_000
"""Longer texts are refused unread. Within it twitter-text accepts all but texts of huge URLs."""

_SCALE = 100
_DEFAULT_WEIGHT = 200
_LIGHT_WEIGHT = 100
_LIGHT_RANGES = ((0, 4351), (8192, 8205), (8208, 8223), (8242, 8247))
_LIGHT = frozenset(chr(code) for low, high in _LIGHT_RANGES for code in range(low, high + 1))
_URL_WEIGHT = 23 * _SCALE
_MAX_URL_LENGTH = 4096
_MAX_TCO_SLUG = 40
_MAX_HOST_LABEL = 63  # RFC 1035, in the label's ASCII form


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A text and twitter-text's verdict on it (`parseTweet`); both ranges have inclusive ends."""

    text: str
    """In NFC."""
    weighted_length: int
    """0 and up; at most `MAX_WEIGHTED_LENGTH` in a valid text."""
    valid: bool
    """twitter-text's verdict; see `invalid_reason` for the service's, which is stricter."""
    permillage: int
    """`weighted_length` in thousandths of the maximum."""
    display_range: tuple[int, int]
    """UTF-16 units of the text as given (before NFC)."""
    valid_range: tuple[int, int]
    """UTF-16 units that fit within the maximum, up to the first invalid character."""
    invalid_reason: str | None
    """Why the service refuses the text, for people; None when it's accepted."""


def parse(text: str) -> ParsedText:
    """Weigh `text`. Never raises: what can't be a tweet has `invalid_reason`.

    In a text too large to scan each code point counts by itself, which is always over the maximum.
    """
    scanned = _is_scannable(text)
    normal = unicodedata.normalize("NFC", text) if scanned else text
    weight = units = last_valid = 0
    clean = True
    for piece, piece_weight in _pieces(normal, dict(_urls(normal)) if scanned else {}):
        weight += piece_weight
        units += _utf16_units(piece)
        clean = clean and piece[-1] not in _INVALID
        if clean and weight <= MAX_WEIGHTED_LENGTH * _SCALE:
            last_valid = units - 1
    length, given_units = weight // _SCALE, _utf16_units(text)
    return ParsedText(
        text=normal,
        weighted_length=length,
        valid=clean and 0 < length <= MAX_WEIGHTED_LENGTH,
        permillage=int(length / MAX_WEIGHTED_LENGTH * 1000),  # in floats, as twitter-text has it
        display_range=(0, max(0, given_units - 1)),
        valid_range=(0, last_valid + given_units - units),
        invalid_reason=_invalid_reason(normal, length),
    )


def invalid_reason(text: str) -> str | None:
    """Why the service refuses `text`, for people; None when it's accepted."""
    return parse(text).invalid_reason


def extract_mentions(text: str) -> list[str]:
    """The user names mentioned, without @, in order, repeats kept; none if too large to scan."""
    if len(text) > MAX_CODE_POINTS:
        return []
    return [m["name"] for m in _MENTION.finditer(text) if not m["list"] and m["spoilt"] is None]


def extract_hashtags(text: str) -> list[str]:
    """The hashtags in `text`, without #, in order, repeats kept; none if too large to scan.

    Of a hashtag and a URL that overlap, the one that begins first counts.
    """
    if len(text) > MAX_CODE_POINTS:
        return []
    tags, end = [], 0
    for start, stop, tag in sorted([*_hashtags(text), *((*url, "") for url in _urls(text))]):
        if start >= end:
            end = stop
            if tag:
                tags.append(tag)
    return tags


# Weights

# Reordering a run of marks costs NFC the square of its length. A run this long is too heavy anyway.
_MAX_MARKS = MAX_WEIGHTED_LENGTH


def _is_scannable(text: str) -> bool:
    return len(text) <= MAX_CODE_POINTS and not any(
        is_mark and sum(1 for _ in run) > _MAX_MARKS
        for is_mark, run in groupby(text, lambda char: unicodedata.combining(char) > 0)
    )


def _invalid_reason(text: str, length: int) -> str | None:
    if not text.strip():
        return "text is blank"
    if len(text) > MAX_CODE_POINTS:
        return f"text has more than {MAX_CODE_POINTS} characters"
    if refused := _REFUSED.search(text):
        return f"text has the character U+{ord(refused[0]):04X}, which no tweet may have"
    if length > MAX_WEIGHTED_LENGTH:
        return f"text has a weighted length of {length}; the most is {MAX_WEIGHTED_LENGTH}"
    return None


def _utf16_units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


# Only sequences are looked up: an emoji of one code point already weighs the default, and © and ®,
# which are emoji only if a variation selector says so, must stay light.
_SEQUENCES = frozenset(sequence for sequence in emoji.EMOJI_DATA if len(sequence) > 1)
_SEQUENCE_STARTS = frozenset(sequence[0] for sequence in _SEQUENCES)
_LONGEST_SEQUENCE = max(map(len, _SEQUENCES))


def _pieces(text: str, urls: dict[int, int]) -> Iterator[tuple[str, int]]:
    """Each URL (`urls` is start to end), emoji sequence or single code point, with its weight."""
    at = 0
    while at < len(text):
        if at in urls:
            end, weight = urls[at], _URL_WEIGHT
        elif end := _sequence_end(text, at):
            weight = _DEFAULT_WEIGHT
        else:
            end = at + 1
            weight = _LIGHT_WEIGHT if text[at] in _LIGHT else _DEFAULT_WEIGHT
        yield text[at:end], weight
        at = end


def _sequence_end(text: str, at: int) -> int:
    if text[at] in _SEQUENCE_STARTS:
        for end in range(min(len(text), at + _LONGEST_SEQUENCE), at + 1, -1):
            if text[at:end] in _SEQUENCES:
                return end
    return 0


# Character classes, for use within [ ]

_INVALID = "\ufffe\ufeff\uffff"
_REFUSED = re.compile(f"[\0\ud800-\udfff{_INVALID}]")
_LATIN = "À-ÖØ-öø-ɏɓɔɖɗəɛɣɨɯɲʉʋʻ\u0300-\u036fḀ-ỿ"
_SPACES = "\t-\r \u0085\u00a0\u1680\u180e\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_DIRECTIONS = "\u202a-\u202e\u061c\u200e\u200f\u2066-\u2069"
_NOT_IN_HOST = rf"!'#%&()*+,\\/:;<=>?@\[\]^{{|}}~${_SPACES}{_INVALID}{_DIRECTIONS}"


# Mentions and hashtags

_MENTION = re.compile(
    r"(?:^|[^A-Za-z0-9_!#$%&*@＠]|(?:^|[^A-Za-z0-9_+~.-])[rR][tT]:?)"
    r"[@＠](?P<name>[A-Za-z0-9_]{1,20})(?P<list>/[A-Za-z][A-Za-z0-9_-]{0,24})?"
    # A group, not a condition: a name that this spoils is used up all the same.
    rf"(?=(?P<spoilt>[@＠{_LATIN}]|://)?)"
)
_HASH = re.compile("[#＃](?![\ufe0f\u20e3])")  # not the keycap
_TAG_SPECIALS = frozenset("_\u200c\u200d\ua67e\u05be\u05f3\u05f4～〜゛゜゠・〃\u0f0b\u0f0c·")


def _hashtags(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, tag) of each, as if there were no URLs. `start` is that of the #."""
    end = -1  # of the last tag: a letter of it is not free to come before the next
    for sign in _HASH.finditer(text):
        start = sign.start()
        before = text[start - 1 : start]
        if start == end or before == "&" or (before not in "\ufe0e\ufe0f" and _in_tag(before)):
            continue
        stop = next((at for at in range(start + 1, len(text)) if not _in_tag(text[at])), len(text))
        tag = text[start + 1 : stop]
        if any(unicodedata.category(char)[0] in "LM" for char in tag):
            end = stop
            if not text.startswith(("#", "＃", "://"), stop):
                yield start, stop, tag


def _in_tag(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] in "LM" or category == "Nd" or char in _TAG_SPECIALS


# URLs


def _top_level_domains() -> frozenset[str]:
    """Every top-level domain, in lower case and Unicode form.

    Not by the package's own look-up: it knows no `za`, which has rules for its subdomains only.
    """
    rules = files("publicsuffixlist").joinpath("public_suffix_list.dat").read_text("utf-8")
    icann = rules.partition("===BEGIN ICANN DOMAINS===")[2].partition("===END ICANN DOMAINS===")[0]
    lines = (line.strip() for line in icann.splitlines())
    return frozenset(line.rpartition(".")[2].lower() for line in lines if line and not line.startswith("//"))


_TLDS = _top_level_domains()
_LONGEST_TLD = max(map(len, _TLDS))
_TLD_GOES_ON = re.compile("[0-9A-Za-z@+-]")
_PUNYCODE = re.compile("xn--[-0-9a-z]+", re.IGNORECASE)

_HOST_RUN = re.compile(f"[^{_NOT_IN_HOST}]+")  # labels and dots, maximal
_NOT_BEFORE = f"(?<![A-Za-z0-9@＠$#＃{_INVALID}])"
_HOST_START = re.compile(rf"{_NOT_BEFORE}[^-_.{_NOT_IN_HOST}]")
_PROTOCOL = re.compile(rf"{_NOT_BEFORE}https?://\Z", re.IGNORECASE)
_ASCII_LABELS = re.compile(rf"(?<![-A-Za-z0-9{_LATIN}])(?:[-A-Za-z0-9{_LATIN}]++\.)+")

_IN_PATH = rf"[A-Za-z0-9Ѐ-ӿ{_LATIN}!*';:=+,.$/%#\[\]–_~@|&-]"
_PARENS = rf"\((?:{_IN_PATH}++|{_IN_PATH}*+\({_IN_PATH}++\){_IN_PATH}*+)\)"
_PATH_END = rf"[A-Za-z0-9Ѐ-ӿ{_LATIN}+=_#/-]"
_QUERY = r"\?[A-Za-z0-9!?*'@();:&=+$/%#\[\]_.,~|-]*[A-Za-z0-9_&=#/-]"
_TAIL = re.compile(rf"(?::[0-9]+)?(?P<path>/(?:(?:{_IN_PATH}|{_PARENS})*(?:{_PATH_END}|{_PARENS}))?)?(?:{_QUERY})?")
_TCO = re.compile(rf"https?://t\.co/([a-z0-9]+)(?:{_QUERY})?", re.IGNORECASE)


def _urls(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each URL, with or without a protocol, in order."""
    free = 0  # what comes before it is used up; a URL needs one free character before itself
    for run in _HOST_RUN.finditer(text):
        for low, high, chain, tld in _labels(text, *run.span()):
            start = _host_start(text, max(low, free), high, chain, tld)
            if start is None:
                continue
            host = text[start : chain or tld]
            end, has_path = _tail(text, start + len(host))
            protocol = _PROTOCOL.search(text, max(start - 8, free), start)
            free = end + 1  # even if it turns out to be no URL
            if not _is_host(host):
                continue
            if protocol:
                yield from _url_with_protocol(text, protocol.start(), start, end)
            elif text[start - 1 : start] not in ("-", "_", ".", "/"):
                yield from _bare_urls(host, start, end, has_path)


def _labels(text: str, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """(start, end, chain, tld) of each label of a run, from the left.

    `chain` is where the longest host ends that begins with the next label, `tld` where the
    top-level domain ends that begins there; each is 0 if there's none. They are worked out from
    the right, so that no label is looked at twice.
    """
    labels = []
    chain = tld = 0
    dots = [at for at in range(start, end) if text[at] == "."]
    for low, high in reversed([(at + 1, to) for at, to in pairwise([start - 1, *dots, end])]):
        labels.append((low, high, chain, tld))
        is_label = low < high and text[low] not in "-_" and text[high - 1] not in "-_"
        # Only subdomains may have a "_": not the label before the top-level domain.
        may_end = is_label and "_" not in text[low:high]
        chain = (chain if is_label else 0) or (tld if may_end else 0)
        tld = _tld_end(text, low) if low > start else 0  # the first label follows none
    return labels[::-1]


def _host_start(text: str, low: int, high: int, chain: int, tld: int) -> int | None:
    """The first place from `low` on in a label (that ends at `high`) where a host may begin."""
    if not (chain or tld) or low >= high or text[high - 1] in "-_":
        return None
    if not chain:
        low = max(low, text.rfind("_", low, high) + 1)
    # twitter-text takes a text's first letter for the one before the host, if it's not ASCII.
    found = low == 0 and _HOST_START.match(text, 1, high)
    found = found or _HOST_START.search(text, low, high)
    return found.start() if found else None


def _tld_end(text: str, start: int) -> int:
    """Where the top-level domain ends that begins at `start`; 0 if there's none."""
    for end in range(min(len(text), start + _LONGEST_TLD), start, -1):
        if text[start:end].lower() in _TLDS and not _TLD_GOES_ON.match(text, end):
            return end
    punycode = _PUNYCODE.match(text, start)
    return punycode.end() if punycode else 0


def _tail(text: str, start: int) -> tuple[int, bool]:
    """Where the port, path and query end that follow a host, and whether there is a path."""
    tail = _TAIL.match(text, start)
    return (tail.end(), tail["path"] is not None) if tail else (start, False)


def _is_host(host: str) -> bool:
    if host.startswith("xn--") and not any(_ascii_hosts(host)):
        return False
    return all(_has_dns_length(label) for label in host.split("."))


def _has_dns_length(label: str) -> bool:
    if len(label) > _MAX_HOST_LABEL:  # before it's encoded, which takes the square of its length
        return False
    return label.isascii() or len(b"xn--" + label.encode("punycode")) <= _MAX_HOST_LABEL


def _url_with_protocol(text: str, start: int, host: int, end: int) -> Iterator[tuple[int, int]]:
    tco = _TCO.match(text, start, end)
    is_slug_too_long = tco and len(tco[1]) > _MAX_TCO_SLUG
    if (host - start) + (end - start) <= _MAX_URL_LENGTH and not is_slug_too_long:
        yield start, tco.end() if tco else end


def _bare_urls(host: str, start: int, end: int, has_path: bool) -> Iterator[tuple[int, int]]:
    """The ASCII hosts within `host`; the path, if any, goes to the last of them."""
    if len("https://") + end - start > _MAX_URL_LENGTH:
        return
    spans = [(start + low, start + high) for low, high in _ascii_hosts(host)]
    if spans and has_path:
        spans[-1] = spans[-1][0], end
    yield from spans


def _ascii_hosts(host: str) -> Iterator[tuple[int, int]]:
    for labels in _ASCII_LABELS.finditer(host):
        dots = (at for at in range(labels.end() - 1, labels.start(), -1) if host[at] == ".")
        if end := next(filter(None, (_tld_end(host, dot + 1) for dot in dots)), 0):
            yield labels.start(), end
