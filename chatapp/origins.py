"""Which pages may open the websocket."""

from __future__ import annotations

from typing import Any

from channels.security.websocket import WebsocketDenier
from django.conf import settings
from django.http.request import validate_host


class OriginAllowed:
    """ASGI middleware: lets a websocket through from the site's own pages and from ``ALLOWED_ORIGINS``.

    Cookies are not bound to a port, so the whole origin must be that of the address asked, not only its host.
    Browsers always send an Origin; what sends none is not a browser and has no cookies to misuse.
    """

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> Any:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._allows(headers.get(b"origin"), headers.get(b"host", ""), scope.get("scheme", "ws")):
            return await self._application(scope, receive, send)
        return await WebsocketDenier()(scope, receive, send)

    def _allows(self, origin: str | None, host: str, scheme: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not validate_host(name, settings.ALLOWED_HOSTS):
            return False
        own = f"{'https' if scheme == 'wss' else 'http'}://{host}"
        return origin is None or origin in (own, *settings.ALLOWED_ORIGINS)
