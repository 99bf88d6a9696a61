"""``manage.py sign_in_link``: a link that signs a user in once."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from chatapp import accounts
from chatapp.models import User


class Command(BaseCommand):
    help = "Print a link that signs a user in, once, within a day."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username", nargs="?", help="default: the first administrator, made if need be")

    def handle(self, *_: Any, username: str | None, **__: Any) -> str:
        if username is None:
            return accounts.one_time_sign_in_url(accounts.first_administrator(), settings.PUBLIC_URL)
        user = User.objects.filter(username=username, is_active=True).first()
        if user is None:
            raise CommandError(f"There is no active user {username!r}.")
        return accounts.one_time_sign_in_url(user, settings.PUBLIC_URL)
