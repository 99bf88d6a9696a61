"""The ASGI application: HTTP through Django, the websocket through Channels. Must not import torch."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "chatapp.settings")
django_application = get_asgi_application()

# Only now are Django's apps ready for these.
from channels.auth import AuthMiddlewareStack  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.urls import path  # noqa: E402

from chatapp.consumers import ChatConsumer  # noqa: E402
from chatapp.origins import OriginAllowed  # noqa: E402

application = ProtocolTypeRouter(
    {
        "http": django_application,
        "websocket": OriginAllowed(AuthMiddlewareStack(URLRouter([path("ws/", ChatConsumer.as_asgi())]))),
    }
)
