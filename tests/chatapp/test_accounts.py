"""Accounts: signing up, in and out, the one-time link, passwords, and what every page sends along."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from django.core.management import CommandError, call_command
from django.test import Client, override_settings

from chatapp import accounts
from chatapp.models import User

PASSWORD = "correct horse battery"

pytestmark = pytest.mark.django_db


def sign_up(client: Client, username: str = "ada") -> None:
    answer = client.post(
        "/accounts/sign-up/", {"username": username, "password1": PASSWORD, "password2": PASSWORD}
    )
    assert answer.status_code == 302, answer.content


def is_signed_in(client: Client) -> bool:
    return client.get("/").status_code == 200


def path_of(url: str) -> str:
    return urlsplit(url).path


def test_sign_up_signs_in_and_sign_out_ends_it(client: Client) -> None:
    assert client.get("/")["Location"] == "/accounts/sign-in/?next=/"
    sign_up(client)
    assert is_signed_in(client)
    assert client.get("/accounts/sign-out/").status_code == 405, "a link must not sign anybody out"
    client.post("/accounts/sign-out/")
    assert not is_signed_in(client)
    client.post("/accounts/sign-in/", {"username": "ada", "password": PASSWORD})
    assert is_signed_in(client)


def test_passwords_are_hashed_and_weak_ones_refused(client: Client) -> None:
    sign_up(client)
    assert PASSWORD not in User.objects.get(username="ada").password
    answer = client.post(
        "/accounts/sign-up/", {"username": "bob", "password1": "12345678", "password2": "12345678"}
    )
    assert not User.objects.filter(username="bob").exists()
    assert answer.status_code in (200, 302)


@override_settings(SIGN_UP_ALLOWED=False)
def test_sign_up_can_be_switched_off(client: Client) -> None:
    assert client.get("/accounts/sign-up/").status_code == 404
    assert client.post("/accounts/sign-up/", {"username": "ada"}).status_code == 404
    assert "/accounts/sign-up/" not in client.get("/accounts/sign-in/").content.decode()


def test_wrong_password_and_unknown_user_look_the_same(client: Client) -> None:
    User.objects.create_user("ada", password=PASSWORD)
    answers = [
        client.post("/accounts/sign-in/", {"username": name, "password": "wrong"}) for name in ("ada", "eve")
    ]
    errors = [answer.context["form"].errors for answer in answers]
    assert errors[0]
    assert errors[0] == errors[1]


def test_the_first_administrator_is_made_once() -> None:
    User.objects.create_user("admin")
    first = accounts.first_administrator()
    assert first.is_superuser
    assert first.username == "admin2"
    assert not first.has_usable_password()
    assert accounts.first_administrator() == first


def test_the_link_signs_in_once(client: Client) -> None:
    link = path_of(accounts.one_time_sign_in_url(accounts.first_administrator(), "http://testserver"))
    client.get(link)
    assert is_signed_in(client)
    assert client.get("/admin/").status_code == 200
    other = Client()
    assert other.get(link)["Location"] == "/"
    assert not is_signed_in(other)


def test_a_command_makes_links_for_anybody(client: Client) -> None:
    User.objects.create_user("ada")
    client.get(path_of(call_command("sign_in_link", "ada").strip()))
    assert is_signed_in(client)
    with pytest.raises(CommandError, match="eve"):
        call_command("sign_in_link", "eve")


def test_a_changed_or_expired_link_does_not_sign_in(client: Client) -> None:
    administrator = accounts.first_administrator()
    link = path_of(accounts.one_time_sign_in_url(administrator, "http://testserver"))
    for wrong in (link[:-3] + "zz/", "/accounts/sign-in/MQ/x-y/", "/accounts/sign-in/!!/x-y/"):
        client.get(wrong)
        assert not is_signed_in(client)
    with override_settings(PASSWORD_RESET_TIMEOUT=-1):
        client.get(link)
    assert not is_signed_in(client)


def test_an_account_without_password_sets_one_and_then_changes_it(client: Client) -> None:
    administrator = accounts.first_administrator()
    client.force_login(administrator)
    client.post("/accounts/password/", {"new_password1": PASSWORD, "new_password2": PASSWORD})
    assert is_signed_in(client), "the own session goes on"
    new = PASSWORD + " staple"
    client.post("/accounts/password/", {"new_password1": new, "new_password2": new})
    administrator.refresh_from_db()
    assert administrator.check_password(PASSWORD), "the old one must be given"
    client.post("/accounts/password/", {"old_password": PASSWORD, "new_password1": new, "new_password2": new})
    administrator.refresh_from_db()
    assert administrator.check_password(new)


@pytest.mark.parametrize(
    "path",
    [
        "/accounts/sign-in/",
        "/accounts/sign-up/",
        "/accounts/sign-out/",
        "/accounts/password/",
        "/language/",
        "/admin/",
    ],
)
def test_forms_without_a_token_are_refused(path: str) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root", password=PASSWORD))
    assert client.post(path, {}).status_code == 403


@pytest.mark.parametrize(
    "path", ["/", "/accounts/sign-in/", "/accounts/sign-up/", "/no-such-page/", "/admin/"]
)
def test_every_page_has_a_strict_policy_and_nothing_inline(client: Client, path: str) -> None:
    if path in ("/", "/admin/"):
        client.force_login(accounts.first_administrator())
    answer = client.get(path)
    policy = answer["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer["X-Frame-Options"] == "DENY"
    html = answer.content.decode()
    assert not re.search(r"<script(?![^>]*(\bsrc=|type=\"application/json\"))", html)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"", html)


def test_pages_speak_chinese(client: Client) -> None:
    client.post("/language/", {"language": "zh-hans"})
    page = client.get("/accounts/sign-in/").content.decode()
    assert 'lang="zh-hans"' in page.lower()
    assert "登录" in page
    assert "登录" not in Client(headers={"accept-language": "en"}).get("/accounts/sign-in/").content.decode()


def test_staff_see_that_there_are_conversations_but_not_what_was_written(client: Client) -> None:
    from chatapp.models import Conversation, Message

    conversation = Conversation.objects.create(owner=User.objects.create_user("ada"), title="secret title")
    message = Message.objects.create(conversation=conversation, role="user", text="secret text")
    client.force_login(accounts.first_administrator())
    for path in (
        "/admin/chatapp/conversation/",
        f"/admin/chatapp/conversation/{conversation.pk}/change/",
        "/admin/chatapp/message/",
        f"/admin/chatapp/message/{message.pk}/change/",
    ):
        answer = client.get(path)
        assert answer.status_code == 200
        assert str(conversation.pk) in answer.content.decode()
        assert "secret" not in answer.content.decode()
