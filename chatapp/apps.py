"""The Django app, and the signals that end sockets whose session has ended."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class ChatappConfig(AppConfig):
    name = "chatapp"
    verbose_name = "Keepwarm"

    def ready(self) -> None:
        from django.contrib.auth.signals import user_logged_out
        from django.db.models.signals import post_save

        from chatapp.models import User

        user_logged_out.connect(_signed_out, dispatch_uid="chatapp.signed_out")
        post_save.connect(_user_saved, sender=User, dispatch_uid="chatapp.user_saved")


def _signed_out(request: Any, user: Any, **_: Any) -> None:
    from chatapp import wakeups

    if user is not None and request.session.session_key:
        wakeups.session_ended(user.pk, request.session.session_key)


def _user_saved(instance: Any, update_fields: Any, **_: Any) -> None:
    """A password changed or an account deactivated; a mere sign-in saves ``last_login`` alone."""
    from chatapp import wakeups

    if update_fields is None or not set(update_fields) <= {"last_login"}:
        wakeups.rights_changed(instance.pk)
