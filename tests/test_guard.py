"""Who may call a server: hosts, origins, content types and keys."""

import hmac
import json
from base64 import b64encode, urlsafe_b64encode
from urllib.parse import quote

import pytest

from draftsmith.net.access import Guard, Paths

HERE = {"Host": "127.0.0.1:8000"}
OPEN = {"/health": "it says nothing"}
ADMIN = Paths(admin=frozenset({"/admin/", "/v1/switch"}))
# urlsplit raises for the first three. The others are no ASCII, also as websockets 15 decodes them.
ODD = ("http://[", "http://[::1", "http://\u2100", "http://\xff", "\udcff", "//")


@pytest.mark.parametrize(
    ("guard", "method", "path", "headers", "status"),
    [
        (Guard(), "GET", "/x", {}, None),
        (Guard(), "GET", "/x", HERE, None),
        (Guard(), "GET", "/x", {"Host": "[::1]:8000"}, None),
        (Guard(), "GET", "/x", {"Host": "LocalHost"}, None),
        (Guard(), "GET", "/x", {"Host": "evil.example"}, 403),
        (Guard(), "GET", "/x", {"Host": "127.0.0.1.evil.example"}, 403),
        (Guard(), "GET", "/x", {"Host": "[oops"}, 403),
        (Guard(), "GET", "/x", {"Host": "evil@localhost"}, 403),
        (Guard(paths=Paths(OPEN)), "GET", "/health", {"Host": "evil.example"}, None),
        (Guard(frozenset({"mine"})), "GET", "/x", {"Host": "Mine:80"}, None),
        # The site's own page; others only if they are allowed.
        (Guard(), "POST", "/x", HERE | {"Origin": "http://127.0.0.1:8000"}, None),
        (Guard(), "POST", "/x", HERE | {"Origin": "http://127.0.0.1:9"}, 403),
        (Guard(), "POST", "/x", HERE | {"Origin": "null"}, 403),
        (Guard(), "GET", "/x", {"Origin": "null"}, 403),
        (Guard(), "GET", "/x", {"Host": "", "Origin": ""}, 403),
        *[(Guard(), "GET", "/x", HERE | {"Origin": odd}, 403) for odd in ODD],
        *[(Guard(), "GET", "/x", {"Host": odd}, 403) for odd in ODD],
        (Guard(), "GET", "/x", {"Host": "e.example", "Origin": "http://e.example"}, 403),
        (Guard(origins=frozenset({"http://a"})), "GET", "/x", HERE | {"Origin": "http://a"}, None),
        (Guard(origins=frozenset({"http://a"})), "GET", "/x", HERE | {"Origin": "http://b"}, 403),
        (Guard(origins=frozenset("*")), "GET", "/x", HERE | {"Origin": "http://b"}, None),
        # A page can send text to another site without asking, but no JSON.
        (Guard(), "POST", "/x", {"Content-Length": "2", "Content-Type": "text/plain"}, 415),
        (Guard(), "POST", "/x", {"Transfer-Encoding": "chunked"}, 415),
        (Guard(), "POST", "/x", {"Content-Length": "0"}, None),
        (
            Guard(),
            "POST",
            "/x",
            {"Content-Length": "2", "Content-Type": "Application/JSON;x"},
            None,
        ),
        (Guard(json=False), "POST", "/x", {"Content-Length": "2"}, None),
        # Who has the key may call by any name.
        (Guard(key="k"), "GET", "/x", {"Host": "mine", "Authorization": "Bearer k"}, None),
        (Guard(key="k"), "GET", "/x", HERE | {"Authorization": "bEARER  k"}, None),
        (Guard(key="k"), "GET", "/x", HERE | {"Authorization": "Basic k"}, 401),
        (Guard(key="k"), "GET", "/x", HERE, 401),
        (Guard(key="ü"), "GET", "/x", HERE | {"Authorization": "Bearer \xc3\xbc"}, None),
        # Each path asks for one key: that of the administrator, the server's, or none.
        (Guard(key="k"), "GET", "/admin/x", HERE, 401),
        (Guard(key="k", paths=ADMIN), "GET", "/admin/x", HERE, None),
        (Guard(admin_key="k", paths=ADMIN), "GET", "/x", HERE, None),
        (Guard(admin_key="k", paths=ADMIN), "GET", "/admin/x", HERE, 401),
        (Guard(admin_key="k", paths=ADMIN), "GET", "/v1/switch", HERE, 401),
        (Guard(admin_key="k", paths=ADMIN), "GET", "/v1/switchboard", HERE, None),
        (Guard(key="k", paths=Paths(others="it is said")), "GET", "/x", HERE, None),
    ],
)
def test_who_is_let_in(
    guard: Guard, method: str, path: str, headers: dict[str, str], status: int | None
) -> None:
    fault = guard.fault(method, path, headers.items())
    assert (fault and fault.status) == status
    if fault is not None:
        assert json.loads(fault.response().body)["error"]["message"].isascii()


@pytest.mark.parametrize("key", ["admin", "c2VjcmV0LWtleQ==", "a+b/c=", "=x;y", "ключ"])
def test_an_admin_key_is_seen_wherever_it_is_sent(key: str) -> None:
    guard = Guard(admin_key=key)
    quoted, basic = quote(key, safe=""), b64encode(f"name:{key}".encode()).decode()
    url_safe = urlsafe_b64encode(f"a?>~ÿ:{key}".encode()).decode()
    for sent in (
        *(f"Bearer {key}", key, f'a="{key}"; b=c', f"x={key}", f"key={quoted}"),
        *(f"Basic {basic}", f"basic  {basic}", f"/v1/{quoted}/models", f"/{key}"),
        *(f"[{key}]", f"a|{key}|b", f"<{key}>", f"{{{key}}}", f"q=a+{key}", f"a?{key}#b"),
        *(f"{key}.", f"/files/{key}.json", f"v1.{key}", f"/~{key}~", f"{key}%", f"...{key}..."),
        *(quote(quote(quoted, safe=""), safe=""), f"Basic\t{basic}", f"Basic {url_safe}"),
    ):
        assert guard.shows_admin_key([b"a=b", sent.encode()]), sent
    for other in (f"Bearer {key}s", f"Bearer my-{key}", f"{key}-2", f"{key}_2", f"1{key}"):
        assert not guard.shows_admin_key([other.encode()])
    assert not Guard().shows_admin_key([b"", key.encode()])


@pytest.mark.parametrize("key", ["secret", "c2Vj==", "=a"])
@pytest.mark.parametrize("sent", [b"," * 9999, b"%2C" * 3333, b"a-," * 3333, b"=" * 9999])
def test_no_header_is_compared_at_each_of_its_signs(
    key: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: compared.append(one))
    assert not Guard(admin_key=key).shows_admin_key([sent])
    assert not compared
