"""What can be done with conversations and their messages, always on behalf of an owner.

Plain synchronous functions over the database. What is not the owner's is not there: both give ``not_found``.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from chatapp import protocol, wakeups
from chatapp.models import Conversation, Message, User
from chatapp.protocol import ProtocolError
from chatapp.streams import get_streams
from chatapp.text import clean_line, clean_text, is_blank, title_from

logger = logging.getLogger(__name__)


def find(owner: User, conversation_id: UUID, *, lock: bool = False) -> Conversation:
    """Read a conversation; ``lock`` keeps others from changing it until the transaction ends."""
    conversations = Conversation.objects.filter(owner=owner)
    if lock:
        conversations = conversations.select_for_update()
    conversation = conversations.filter(pk=conversation_id).first()
    if conversation is None:
        raise ProtocolError("not_found", "There is no such conversation.", param="conversation")
    return conversation


def find_message(conversation: Conversation, message_id: UUID, *, param: str) -> Message:
    message = conversation.messages.filter(pk=message_id).first()
    if message is None:
        raise ProtocolError("not_found", "There is no such message in this conversation.", param=param)
    return message


def mark_changed(conversation: Conversation) -> None:
    """Count a change of a locked conversation and tell the owner's sockets once it is stored."""
    conversation.version += 1
    conversation.updated_at = timezone.now()
    conversation.save()
    transaction.on_commit(
        lambda: wakeups.conversation_changed(conversation.owner_id, conversation.pk, conversation.version)
    )


@transaction.atomic
def create(owner: User, event: protocol.ConversationCreate) -> Conversation:
    if event.id is not None:
        existing = Conversation.objects.filter(pk=event.id).first()
        if existing is not None:
            if existing.owner_id != owner.pk:
                raise ProtocolError("id_in_use", "Choose another id.", param="id")
            return existing
    conversation = Conversation(
        owner=owner,
        title=clean_line(event.title),
        system_prompt=clean_text(event.system_prompt),
        sampling=event.sampling.model_dump(exclude_none=True),
    )
    if event.id is not None:
        conversation.pk = event.id
    conversation.save(force_insert=True)
    mark_changed(conversation)
    return conversation


@transaction.atomic
def update(owner: User, event: protocol.ConversationUpdate) -> Conversation:
    conversation = find(owner, event.conversation, lock=True)
    if event.title is not None:
        conversation.title = clean_line(event.title)
    if event.system_prompt is not None:
        conversation.system_prompt = clean_text(event.system_prompt)
    if event.sampling is not None:
        conversation.sampling = event.sampling.model_dump(exclude_none=True)
    mark_changed(conversation)
    return conversation


@transaction.atomic
def delete(owner: User, conversation_id: UUID) -> list[UUID]:
    """Delete a conversation with all its messages and streams; answers in the making are cancelled.

    Returns:
        The ids of its answers.
    """
    conversation = find(owner, conversation_id, lock=True)
    answers = conversation.messages.filter(role=Message.Role.ASSISTANT)
    active = set(answers.filter(state__in=Message.ACTIVE).values_list("pk", flat=True))
    all_answers = list(answers.values_list("pk", flat=True))
    conversation.delete()

    transaction.on_commit(lambda: wakeups.conversation_deleted(owner.pk, conversation_id))
    transaction.on_commit(lambda: _forget(owner, conversation_id, all_answers, active))
    return all_answers


def _forget(owner: User, conversation_id: UUID, answers: list[UUID], active: set[UUID]) -> None:
    """Drop what is kept of a deleted conversation outside of the database."""
    from chatapp.tasks import forget_conversation

    streams = get_streams()
    try:
        for answer in answers:
            streams.discard(answer)
            if answer in active:
                streams.request_cancel(answer)
        forget_conversation.apply_async((str(conversation_id), owner.pk), retry=False)
    except (OperationalError, RedisError):
        # The streams expire, and the KV goes when its memory is needed.
        logger.warning("Conversation %s is deleted, but not yet everywhere", conversation_id, exc_info=True)


def list_page(owner: User, event: protocol.ConversationList) -> tuple[list[Conversation], str | None]:
    """One page of an owner's conversations, most recently changed first, and the cursor of the next page."""
    conversations = Conversation.objects.filter(owner=owner)
    if event.search:
        search = clean_line(event.search)
        found_in = Message.objects.filter(conversation__owner=owner, text__icontains=search)
        conversations = conversations.filter(
            Q(title__icontains=search) | Q(pk__in=found_in.values("conversation_id"))
        )
    if event.before is not None:
        updated_at, pk = _read_cursor(event.before)
        conversations = conversations.filter(
            Q(updated_at__lt=updated_at) | Q(updated_at=updated_at, pk__lt=pk)
        )
    page = list(conversations[: event.limit + 1])
    if len(page) <= event.limit:
        return page, None
    page.pop()
    return page, f"{page[-1].updated_at.isoformat()}/{page[-1].pk}"


def _read_cursor(cursor: str) -> tuple[datetime, UUID]:
    try:
        updated_at, _, pk = cursor.partition("/")
        moment = datetime.fromisoformat(updated_at)
        if moment.tzinfo is None:
            raise ValueError(cursor)
        return moment, UUID(pk)
    except ValueError as invalid:
        raise ProtocolError(
            "invalid_event", "before: not a cursor from keepwarm.conversation.listed", param="before"
        ) from invalid


@transaction.atomic
def add_message(owner: User, event: protocol.ItemCreate) -> Message:
    """Append a user message to a branch and show that branch."""
    text = _checked_text(event.item.text)
    conversation = find(owner, event.conversation, lock=True)
    repeated = _already_stored(conversation, event.item.id)
    if repeated is not None:
        return repeated
    if event.previous_item_id is not None:
        parent: Message | None = find_message(conversation, event.previous_item_id, param="previous_item_id")
    else:
        parent = conversation.leaf
    if not conversation.title:
        conversation.title = title_from(text)
    return _store_user_message(conversation, parent, event.item.id, text)


@transaction.atomic
def edit_message(owner: User, event: protocol.Edit) -> Message:
    """Store a user message's new wording beside the old one and show the new branch."""
    text = _checked_text(event.item.text)
    conversation = find(owner, event.conversation, lock=True)
    repeated = _already_stored(conversation, event.item.id)
    if repeated is not None:
        return repeated
    old = find_message(conversation, event.item_id, param="item_id")
    if old.role != Message.Role.USER:
        raise ProtocolError("not_editable", "Only your own messages can be edited.", param="item_id")
    return _store_user_message(conversation, old.parent, event.item.id, text)


@transaction.atomic
def select_branch(owner: User, event: protocol.Branch) -> Conversation:
    """Show the branch through a message: down from it, the most recent continuation each time."""
    conversation = find(owner, event.conversation, lock=True)
    message = find_message(conversation, event.item_id, param="item_id")
    latest_child = {
        parent_id: pk
        for pk, parent_id in conversation.messages.order_by("created_at", "id").values_list("pk", "parent_id")
    }
    leaf_id = message.pk
    while leaf_id in latest_child:
        leaf_id = latest_child[leaf_id]
    conversation.leaf_id = leaf_id
    mark_changed(conversation)
    return conversation


def branch_to(message: Message) -> list[Message]:
    """The messages from the root to this one, in order."""
    messages = {stored.pk: stored for stored in message.conversation.messages.all()}
    branch: list[Message] = []
    current: UUID | None = message.pk
    while current is not None:
        branch.append(messages[current])
        current = messages[current].parent_id
    return branch[::-1]


def _checked_text(text: str) -> str:
    if len(text) > settings.MESSAGE_MAX_CHARACTERS:
        raise ProtocolError(
            "message_too_long",
            f"The message has {len(text):,} characters; at most {settings.MESSAGE_MAX_CHARACTERS:,} are taken. "
            "Shorten it or send it in parts.",
            param="item.content",
        )
    text = clean_text(text)
    if is_blank(text):
        raise ProtocolError(
            "empty_message", "The message is empty. Write something first.", param="item.content"
        )
    return text


def _already_stored(conversation: Conversation, message_id: UUID | None) -> Message | None:
    """The message that an earlier sending of the same event stored."""
    if message_id is None:
        return None
    stored = Message.objects.filter(pk=message_id).first()
    if stored is None:
        return None
    if stored.conversation_id != conversation.pk or stored.role != Message.Role.USER:
        raise ProtocolError("id_in_use", "Choose another id for the message.", param="item.id")
    return stored


def _store_user_message(
    conversation: Conversation, parent: Message | None, message_id: UUID | None, text: str
) -> Message:
    message = Message(conversation=conversation, parent=parent, role=Message.Role.USER, text=text)
    if message_id is not None:
        message.pk = message_id
    message.save(force_insert=True)
    conversation.leaf = message
    mark_changed(conversation)
    return message


def to_protocol(conversation: Conversation) -> protocol.Conversation:
    return protocol.Conversation(
        id=conversation.pk,
        title=conversation.title,
        system_prompt=conversation.system_prompt,
        sampling=protocol.Sampling(**conversation.sampling),
        created_at=conversation.created_at,
        updated_at=conversation.updated_at,
        version=conversation.version,
    )


def item_to_protocol(message: Message) -> protocol.Item:
    is_user = message.role == Message.Role.USER
    return protocol.Item(
        id=message.pk,
        role=cast(Any, message.role),
        state=cast(protocol.MessageState, message.state),
        # What is known of an answer in the making is in its stream alone, so that nothing is shown twice.
        content=[
            protocol.Text(
                type="input_text" if is_user else "output_text",
                text="" if message.is_active else message.text,
            )
        ],
        previous_item_id=message.parent_id,
        created_at=message.created_at,
        finish_reason=cast(Any, message.finish_reason or None),
        report=message.report,
        error=message.error,
    )


def opened(owner: User, conversation_id: UUID) -> protocol.ConversationOpened:
    """A conversation with all its messages.

    Read without a transaction, which in SQLite would wait for writers: the messages are read after the conversation,
    so its leaf is among them.
    """
    conversation = find(owner, conversation_id)
    messages = list(conversation.messages.all())
    return protocol.ConversationOpened(
        conversation=to_protocol(conversation),
        items=[item_to_protocol(message) for message in messages],
        leaf=conversation.leaf_id,
    )
