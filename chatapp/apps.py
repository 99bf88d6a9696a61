"""The Django app and its signals: sockets end with their session, connections with their request."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class ChatappConfig(AppConfig):
    name = "chatapp"
    verbose_name = "Keepwarm"

    def ready(self) -> None:
        from django.contrib.auth.signals import user_logged_out
        from django.core.signals import request_finished
        from django.db.models.signals import post_save

        from chatapp.models import User

        user_logged_out.connect(_signed_out, dispatch_uid="chatapp.signed_out")
        request_finished.connect(_close_connections, dispatch_uid="chatapp.close_connections")
        post_save.connect(_user_saved, sender=User, dispatch_uid="chatapp.user_saved")


def _close_connections(**_: Any) -> None:
    """Under ASGI each request has a thread of its own: a connection that is kept in it is never used again."""
    from django.db import connections

    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def _signed_out(request: Any, user: Any, **_: Any) -> None:
    from chatapp import wakeups

    if user is not None and request.session.session_key:
        wakeups.session_ended(user.pk, request.session.session_key)


def _user_saved(instance: Any, update_fields: Any, **_: Any) -> None:
    """A password changed or an account deactivated; a mere sign-in saves ``last_login`` alone."""
    from chatapp import wakeups

    if update_fields is None or not set(update_fields) <= {"last_login"}:
        wakeups.rights_changed(instance.pk)
