"""The websocket: checks each event against the protocol and the sender's rights, stores, enqueues, follows turns.

Nothing here is slow: answers are made by Celery tasks and read from the turn's stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, ClassVar
from uuid import UUID

from channels.auth import get_user
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.db import DatabaseError, IntegrityError
from redis.exceptions import RedisError

from chatapp import conversations, protocol, turns, wakeups
from chatapp.database import in_database
from chatapp.followers import Follower
from chatapp.models import User
from chatapp.protocol import ErrorDetail, ProtocolError, ServerEvent, parse_client_event
from chatapp.streams import get_streams
from chatapp.streams.base import ENGINE_HEARTBEAT_SECONDS

logger = logging.getLogger(__name__)

CLOSE_SIGNED_OUT = 4401
# How long a socket trusts that its session still stands; a sign-out is usually told at once (wakeups).
_RIGHTS_DOUBT_SECONDS = 30.0
_STATE_ORDER = ("ready", "loading", "converting", "starting", "failed", "absent")


class ChatConsumer(AsyncWebsocketConsumer):
    """One socket: a browser tab or a bot, with any number of conversations."""

    async def connect(self) -> None:
        self._followers: dict[UUID, tuple[Follower, asyncio.Task[None]]] = {}
        self._sending = asyncio.Lock()
        self._rights_checked_at = time.monotonic()
        self._groups: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        await self.accept()
        self.user: User = self.scope["user"]
        if not self.user.is_authenticated:
            await self._sign_out()
            return
        for group in (wakeups.owner_group(self.user.pk), wakeups.ENGINE_GROUP):
            await self._join(group)
        self._model = await _model_status()
        await self._send_event(
            protocol.SessionCreated(
                username=self.user.get_username(),
                model=self._model,
                limits=protocol.Limits(
                    message_characters=settings.MESSAGE_MAX_CHARACTERS, event_bytes=settings.EVENT_MAX_BYTES
                ),
            )
        )
        self._looking = asyncio.create_task(self._look_around())

    async def disconnect(self, code: int) -> None:
        # Only the reading ends here: an answer is made to its end whether or not somebody watches.
        for _, task in self._followers.values():
            task.cancel()
        if self._looking is not None:
            self._looking.cancel()
        for group in self._groups:
            await self.channel_layer.group_discard(group, self.channel_name)

    # --- Events from the client -----------------------------------------------------------------

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        event_type = event_id = None
        try:
            data = _decode(text_data)
            event_type, event_id = _short_string(data.get("type")), _short_string(data.get("event_id"))
            await self._check_size(text_data or "")
            event = parse_client_event(data)
            if not await self._may_stay():
                return
            await self._handlers[type(event)](self, event)
        except ProtocolError as refused:
            await self._send_error(refused.code, refused.message, refused.param, event_type, event_id)
        except IntegrityError:
            await self._send_error("id_in_use", "Choose another id.", None, event_type, event_id)
        except DatabaseError:
            logger.exception("Event %s could not be stored", event_type)
            await self._send_error(
                "storage_unavailable",
                "The server cannot write its database; nothing was changed. Try again later.",
                None,
                event_type,
                event_id,
            )
        except RedisError:
            logger.exception("Event %s needs Redis", event_type)
            await self._send_error(
                "queue_unavailable",
                "The server's queue cannot be reached. Try again.",
                None,
                event_type,
                event_id,
            )
        except Exception:
            logger.exception("Event %s failed", event_type)
            await self._send_error(
                "internal_error",
                "Something went wrong on the server; its log says what.",
                None,
                event_type,
                event_id,
            )

    async def _check_size(self, text: str) -> None:
        size = len(text.encode(errors="replace"))
        if size > settings.EVENT_MAX_BYTES:
            raise ProtocolError(
                "event_too_large",
                f"The event has {size:,} bytes; at most {settings.EVENT_MAX_BYTES:,} are taken.",
            )

    async def _item_create(self, event: protocol.ItemCreate) -> None:
        message = await in_database(conversations.add_message, self.user, event)
        await self._send_item(event, message)

    async def _edit(self, event: protocol.Edit) -> None:
        message = await in_database(conversations.edit_message, self.user, event)
        await self._send_item(event, message)

    async def _send_item(self, event: protocol.ItemCreate | protocol.Edit, message: Any) -> None:
        await self._send_event(
            protocol.ItemAdded(
                in_reply_to=event.event_id,
                conversation=event.conversation,
                item=conversations.item_to_protocol(message),
            )
        )

    async def _response_create(self, event: protocol.ResponseCreate) -> None:
        answer = await in_database(turns.create, self.user, event)
        await self._send_event(
            protocol.ResponseCreated(in_reply_to=event.event_id, response=turns.to_protocol(answer))
        )
        await self._follow(answer.pk, after=0)

    async def _response_cancel(self, event: protocol.ResponseCancel) -> None:
        events = await in_database(turns.cancel, self.user, event.response_id)
        if event.response_id not in self._followers:
            await self._follow(event.response_id, after=events)

    async def _resume(self, event: protocol.Resume) -> None:
        await in_database(turns.find, self.user, event.response_id)
        await self._follow(event.response_id, event.sequence_number)

    async def _branch(self, event: protocol.Branch) -> None:
        conversation = await in_database(conversations.select_branch, self.user, event)
        await self._send_event(
            protocol.BranchSelected(
                in_reply_to=event.event_id, conversation=conversation.pk, leaf=conversation.leaf_id
            )
        )

    async def _conversation_create(self, event: protocol.ConversationCreate) -> None:
        conversation = await in_database(conversations.create, self.user, event)
        await self._send_event(
            protocol.ConversationCreated(
                in_reply_to=event.event_id, conversation=conversations.to_protocol(conversation)
            )
        )

    async def _conversation_update(self, event: protocol.ConversationUpdate) -> None:
        conversation = await in_database(conversations.update, self.user, event)
        await self._send_event(
            protocol.ConversationUpdated(
                in_reply_to=event.event_id, conversation=conversations.to_protocol(conversation)
            )
        )

    async def _conversation_delete(self, event: protocol.ConversationDelete) -> None:
        answers = await in_database(conversations.delete, self.user, event.conversation)
        for answer in answers:
            await self._unfollow(answer)
        await self._send_event(
            protocol.ConversationDeleted(in_reply_to=event.event_id, conversation=event.conversation)
        )

    async def _conversation_list(self, event: protocol.ConversationList) -> None:
        page, cursor = await in_database(conversations.list_page, self.user, event)
        await self._send_event(
            protocol.ConversationListed(
                in_reply_to=event.event_id,
                conversations=[conversations.to_protocol(conversation) for conversation in page],
                next=cursor,
            )
        )

    async def _conversation_open(self, event: protocol.ConversationOpen) -> None:
        opened = await in_database(conversations.opened, self.user, event.conversation)
        await self._send_event(opened.model_copy(update={"in_reply_to": event.event_id}))

    _handlers: ClassVar[dict[type[protocol.ClientEvent], Callable[[ChatConsumer, Any], Awaitable[None]]]] = {
        protocol.ItemCreate: _item_create,
        protocol.ResponseCreate: _response_create,
        protocol.ResponseCancel: _response_cancel,
        protocol.Resume: _resume,
        protocol.Edit: _edit,
        protocol.Branch: _branch,
        protocol.ConversationCreate: _conversation_create,
        protocol.ConversationUpdate: _conversation_update,
        protocol.ConversationDelete: _conversation_delete,
        protocol.ConversationList: _conversation_list,
        protocol.ConversationOpen: _conversation_open,
    }

    # --- Turns that this socket follows -----------------------------------------------------------

    async def _follow(self, turn: UUID, after: int) -> None:
        await self._unfollow(turn)
        await self._join(wakeups.turn_group(turn))
        follower = Follower(turn, after, self._send_json)
        task = asyncio.create_task(self._run_follower(turn, follower))
        self._followers[turn] = (follower, task)

    async def _run_follower(self, turn: UUID, follower: Follower) -> None:
        try:
            await follower.run()
        except Exception:
            logger.exception("Following turn %s failed", turn)
            await self._send_error(
                "internal_error", "The answer's stream could not be read; resume it.", None, None, None
            )
        current = self._followers.get(turn)
        if current is not None and current[0] is follower:
            del self._followers[turn]
            await self._leave(wakeups.turn_group(turn))

    async def _unfollow(self, turn: UUID) -> None:
        followed = self._followers.pop(turn, None)
        if followed is not None:
            followed[1].cancel()
            await asyncio.gather(followed[1], return_exceptions=True)

    async def _join(self, group: str) -> None:
        await self.channel_layer.group_add(group, self.channel_name)
        self._groups.add(group)

    async def _leave(self, group: str) -> None:
        self._groups.discard(group)
        await self.channel_layer.group_discard(group, self.channel_name)

    # --- Wake-ups from the channel layer ----------------------------------------------------------

    async def turn_grew(self, message: dict[str, Any]) -> None:
        followed = self._followers.get(UUID(message["turn"]))
        if followed is not None:
            followed[0].wake()

    async def conversation_changed(self, message: dict[str, Any]) -> None:
        await self._send_event(
            protocol.ConversationChanged(conversation=message["conversation"], version=message["version"])
        )

    async def conversation_deleted(self, message: dict[str, Any]) -> None:
        await self._send_event(protocol.ConversationDeleted(conversation=message["conversation"]))

    async def engine_changed(self, message: dict[str, Any]) -> None:
        await self._tell_model()

    async def session_ended(self, message: dict[str, Any]) -> None:
        if message["session"] == wakeups.session_digest(self.scope["session"].session_key):
            await self._sign_out()

    async def rights_changed(self, message: dict[str, Any]) -> None:
        self._rights_checked_at = float("-inf")
        await self._may_stay()

    # --- What changes around the socket ------------------------------------------------------------

    async def _look_around(self) -> None:
        """Notice also what nobody wakes for: a worker that was killed, a session that ended, a group that forgot."""
        while True:
            await asyncio.sleep(ENGINE_HEARTBEAT_SECONDS)
            try:
                # Groups forget members after a day, and those that were slow to read.
                for group in list(self._groups):
                    await self.channel_layer.group_add(group, self.channel_name)
                await self._may_stay()
                await self._tell_model()
            except (OSError, RedisError, DatabaseError):
                logger.warning("A socket could not look around", exc_info=True)

    async def _tell_model(self) -> None:
        model = await _model_status()
        if model != self._model:
            self._model = model
            await self._send_event(protocol.ModelChanged(model=model))

    # --- Rights -------------------------------------------------------------------------------------

    async def _may_stay(self) -> bool:
        """Whether the session that opened the socket still stands; closes the socket where it does not."""
        if time.monotonic() - self._rights_checked_at < _RIGHTS_DOUBT_SECONDS:
            return True
        store = import_module(settings.SESSION_ENGINE).SessionStore
        user = await get_user({"session": store(self.scope["session"].session_key)})
        if user.is_authenticated and user.pk == self.user.pk:
            self._rights_checked_at = time.monotonic()
            return True
        await self._sign_out()
        return False

    async def _sign_out(self) -> None:
        await self._send_error("signed_out", "Your session has ended. Sign in again.", None, None, None)
        await self.close(CLOSE_SIGNED_OUT)

    # --- Sending ------------------------------------------------------------------------------------

    async def _send_event(self, event: ServerEvent) -> None:
        await self._send_text(event.model_dump_json())

    async def _send_json(self, event: dict[str, Any]) -> None:
        await self._send_text(json.dumps(event, separators=(",", ":"), ensure_ascii=False))

    async def _send_text(self, text: str) -> None:
        async with self._sending:
            await self.send(text)

    async def _send_error(
        self, code: str, message: str, param: str | None, event: str | None, event_id: str | None
    ) -> None:
        detail = ErrorDetail(code=code, message=message, param=param, event=event, event_id=event_id)
        await self._send_event(protocol.Error(in_reply_to=event_id, error=detail))


def _decode(text: str | None) -> dict[str, Any]:
    try:
        data = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        data = None
    if text is not None and "\\ud" in text.lower():
        data = _without_lone_surrogates(data)
    if not isinstance(data, dict):
        raise ProtocolError("invalid_json", "A frame must be text with one JSON object.")
    return data


def _without_lone_surrogates(data: Any) -> Any:
    """Escapes in JSON can spell half a character, which no UTF-8 can hold: U+FFFD takes its place."""
    utf16 = json.dumps(data, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return json.loads(utf16.decode("utf-16-le", "replace"))


def _short_string(value: Any) -> str | None:
    """What an error may repeat of an event that was not checked yet."""
    if not isinstance(value, str):
        return None
    return value[: protocol.EVENT_ID_MAX_LENGTH]


async def _model_status() -> protocol.ModelStatus:
    """The state of the most advanced worker."""
    statuses = await get_streams().engine_statuses()
    return min(
        statuses,
        key=lambda status: _STATE_ORDER.index(status.state),
        default=protocol.ModelStatus(state="absent"),
    )
