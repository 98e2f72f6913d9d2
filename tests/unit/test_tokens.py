"""Tokens: principals' and pages'."""

import time

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import principals
from mesh.errors import InvalidArgumentError, PermissionDeniedError, UnauthenticatedError
from mesh.page_tokens import PageTokens

SECRET = "a secret that is at least 32 bytes long"
OTHER = "another secret of at least 32 bytes here"


def bearer(token: str) -> str:
    return f"Bearer {token}"


@pytest.mark.parametrize("principal", [principals.user(2**63), principals.service("fanout_svc"), principals.OPERATOR])
def test_a_minted_token_verifies_to_its_principal(principal: principals.Principal) -> None:
    verifier = principals.Verifier(SECRET)
    header = bearer(principals.mint(SECRET, principal))
    assert verifier.verify(header) == principal == verifier.verify(header)


def claims(**changed: object) -> dict[str, object]:
    return {"sub": "user:1", "iss": "starling", "aud": "starling", "iat": 1, "exp": 1 << 40} | changed


@pytest.mark.parametrize(
    "token",
    [
        jwt.encode(claims(exp=1), SECRET, "HS256"),
        jwt.encode(claims(iat=1 << 40), SECRET, "HS256"),
        jwt.encode(claims(iss="other"), SECRET, "HS256"),
        jwt.encode(claims(aud="other"), SECRET, "HS256"),
        jwt.encode({k: v for k, v in claims().items() if k != "exp"}, SECRET, "HS256"),
        jwt.encode(claims(), OTHER, "HS256"),
        jwt.encode(claims(), SECRET + "padding for HS512 to be content with it", "HS512"),
        jwt.encode(claims(), None, "none"),
        *(
            jwt.encode(claims(sub=sub), SECRET, "HS256")
            for sub in (
                "",
                "user:",
                "user:0",
                "user:-1",
                "user:x",
                "user:1:2",
                "user:²",
                "operator:x",
                "root",
                "service:",
            )
        ),
        "",
        "a.b.c",
        "é",
    ],
)
def test_any_other_token_is_refused(token: str) -> None:
    with pytest.raises(UnauthenticatedError):
        principals.Verifier(SECRET).verify(bearer(token))


def test_a_verified_token_is_looked_at_again_once_it_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = principals.Verifier(SECRET)
    header = bearer(principals.mint(SECRET, principals.user(1), lifetime_seconds=100))
    verifier.verify(header)
    looked_at: list[str] = []

    def look(token: str) -> tuple[principals.Principal, float]:
        looked_at.append(token)
        return principals.user(1), 0.0

    monkeypatch.setattr(verifier, "_decode", look)
    verifier.verify(header)
    assert not looked_at
    later = time.time() + 101
    monkeypatch.setattr(time, "time", lambda: later)
    verifier.verify(header)
    assert looked_at


def test_only_a_user_has_a_user_id() -> None:
    assert principals.user(5).user_id == 5
    with pytest.raises(PermissionDeniedError):
        _ = principals.OPERATOR.user_id


ids = st.integers(0, 2**64 - 1)


@given(position=ids, viewer=ids)
def test_a_page_token_gives_back_its_position(position: int, viewer: int) -> None:
    tokens = PageTokens([SECRET])
    assert tokens.decode("List", (viewer,), tokens.encode("List", (viewer,), position)) == position


@given(position=ids, viewer=ids, other=ids)
def test_a_page_token_is_of_one_reader_and_one_call(position: int, viewer: int, other: int) -> None:
    tokens = PageTokens([SECRET])
    token = tokens.encode("List", (viewer,), position)
    wrong = [("Other", (viewer,))]
    if other != viewer:
        wrong.append(("List", (other,)))
    for rpc, binding in wrong:
        with pytest.raises(InvalidArgumentError):
            tokens.decode(rpc, binding, token)


@given(token=st.text(max_size=80))
def test_no_text_is_a_page_token_by_chance(token: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        PageTokens([SECRET]).decode("List", (1,), token)
    assert refused.value.field == "page_token"


@given(position=ids, at=st.integers(0, 33), char=st.sampled_from("AQgw-_"))
def test_a_changed_page_token_is_none(position: int, at: int, char: str) -> None:
    tokens = PageTokens([SECRET])
    token = tokens.encode("List", (1,), position)
    changed = token[:at] + char + token[at + 1 :]
    if changed != token:
        with pytest.raises(InvalidArgumentError):
            tokens.decode("List", (1,), changed)


def test_keys_rotate() -> None:
    old, both, new = PageTokens([OTHER]), PageTokens([SECRET, OTHER]), PageTokens([SECRET])
    assert both.decode("List", (1,), old.encode("List", (1,), 5)) == 5
    assert new.decode("List", (1,), both.encode("List", (1,), 5)) == 5
    with pytest.raises(InvalidArgumentError):
        new.decode("List", (1,), old.encode("List", (1,), 5))
