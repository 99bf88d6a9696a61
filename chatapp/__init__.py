"""The Django project and its one app: web pages, websocket, accounts, admin and the Celery task of a turn.

What lives here talks to people and stores what they wrote. How tokens are made lives in ``inference``; nothing
that the web process imports may use it, because its engine needs torch.
"""

from chatapp.celery import app as celery_app

__all__ = ["celery_app"]
