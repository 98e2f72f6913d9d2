"""A client of the edge as apps have one: JSON over HTTP."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests

from launcher.data_folder import DataFolder
from mesh import principals
from mesh.principals import OPERATOR, Principal

SECONDS = 20.0
API = "/api/v1"


@dataclass
class Rest:
    """Speaks for one principal, or with no token for nobody. `path` is below /api/v1."""

    base: str
    token: str = ""
    session: requests.Session = field(default_factory=requests.Session)

    def call(self, method: str, path: str, body: Any = None, /, **options: Any) -> requests.Response:
        """`body`: an object to send as JSON, or bytes as they are; `options` as requests has them."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        if isinstance(body, bytes):
            options["data"] = body
            headers["Content-Type"] = "application/json"
        elif body is not None:
            options["json"] = body
        headers |= options.pop("headers", {})
        return self.session.request(method, self.base + API + path, headers=headers, timeout=SECONDS, **options)

    def ok(self, method: str, path: str, body: Any = None, /, **options: Any) -> Any:
        """The JSON of an answer that must be a good one."""
        answer = self.call(method, path, body, **options)
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def walk(self, path: str, name: str, limit: int) -> Iterator[Any]:
        """All items of a list, page by page."""
        cursor = ""
        while True:
            page = self.ok("GET", path, params={"limit": limit, "cursor": cursor})
            yield from page[name]
            cursor = page["nextCursor"]
            if not cursor:
                return


def as_(folder: DataFolder, principal: Principal, lifetime_seconds: float = 3_600.0) -> Rest:
    """A client with a development token."""
    mesh = folder.read_mesh()
    assert mesh is not None
    return Rest(mesh.edge, principals.mint(folder.read_secrets().auth_secret, principal, lifetime_seconds))


def new_user(folder: DataFolder, handle: str) -> tuple[Rest, str]:
    """Somebody registered just now: a client, and their id."""
    user_id: str = as_(folder, OPERATOR).ok("POST", "/users", {"handle": handle})["userId"]
    return as_(folder, principals.user(int(user_id))), user_id


def problem(answer: requests.Response, status: int, reason: str = "", names: str | None = None) -> dict[str, Any]:
    """The problem that an answer must be. `names`: the field at fault."""
    assert answer.status_code == status, f"{answer.status_code} {answer.text}"
    assert answer.headers["Content-Type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert found["status"] == status
    assert found["title"]
    assert found["type"]
    assert not reason or found["reason"] == reason, found
    if names is not None:
        assert [fault["field"] for fault in found["fields"]] == [names], found
    if status in {429, 503}:
        assert int(answer.headers["Retry-After"]) >= 1
    return found
