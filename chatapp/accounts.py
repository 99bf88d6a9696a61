"""Accounts: the first administrator, and links that sign in once."""

from __future__ import annotations

from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.urls import reverse
from django.utils.encoding import force_str
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode

from chatapp.models import User


class _OneTimeSignIn(PasswordResetTokenGenerator):
    """Django's reset token hashes the last sign-in's time, so that signing in with it is what makes it void."""

    key_salt = "chatapp.accounts.one-time-sign-in"


one_time_sign_in = _OneTimeSignIn()


def first_administrator() -> User:
    """The administrator who has been here longest; made, without a password, where there is none."""
    administrator = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if administrator is not None:
        return administrator
    name = next(
        name
        for name in ("admin", *(f"admin{number}" for number in range(2, 1000)))
        if not User.objects.filter(username=name).exists()
    )
    return User.objects.create_superuser(name)


def one_time_sign_in_url(user: User, base_url: str) -> str:
    """An absolute link that signs the user in, once and for a limited time."""
    encoded = urlsafe_base64_encode(str(user.pk).encode())
    return base_url + reverse("one-time-sign-in", args=[encoded, one_time_sign_in.make_token(user)])


def user_of_link(encoded: str, token: str) -> User | None:
    """Whom a one-time link signs in; None where it was used, has expired or was never made."""
    try:
        user = User.objects.filter(pk=int(force_str(urlsafe_base64_decode(encoded))), is_active=True).first()
    except (ValueError, OverflowError):
        return None
    return user if user is not None and one_time_sign_in.check_token(user, token) else None
