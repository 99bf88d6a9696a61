"""The websocket's database work, in a few threads of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from channels.db import database_sync_to_async

# Asgiref's default is one thread for all sockets: one user's long search would hold up everybody.
_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="websocket-database")


async def in_database(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that uses the database, without blocking the event loop."""
    return await database_sync_to_async(function, thread_sensitive=False, executor=_threads)(*arguments)
