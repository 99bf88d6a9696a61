"""The life of a turn: asked for, dispatched in its conversation's order, cancelled, ended.

A turn is the answer's message: ``draft`` while it waits, ``streaming`` from the moment its task is enqueued, then
``done``, ``stopped`` or ``failed``. The database allows one streaming answer a conversation.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from chatapp import conversations, protocol, wakeups
from chatapp.models import Conversation, Message, User
from chatapp.protocol import ErrorDetail, ProtocolError
from chatapp.streams import Entry, StaleWriter, get_streams

logger = logging.getLogger(__name__)

_STATUS: dict[str, protocol.ResponseStatus] = {
    Message.State.DRAFT: "queued",
    Message.State.STREAMING: "in_progress",
    Message.State.DONE: "completed",
    Message.State.STOPPED: "cancelled",
    Message.State.FAILED: "failed",
}


@transaction.atomic
def create(owner: User, event: protocol.ResponseCreate) -> Message:
    """Store an answer to be made and dispatch it, now or when the conversation's earlier answers are done."""
    conversation = conversations.find(owner, event.conversation, lock=True)
    repeated = _already_created(conversation, event.response_id)
    if repeated is not None:
        return repeated
    question = _question(conversation, event.previous_item_id)
    active = _conversations_of_active_answers(owner)
    answer = Message(
        conversation=conversation,
        parent=question,
        role=Message.Role.ASSISTANT,
        state=Message.State.DRAFT if conversation.pk in active else Message.State.STREAMING,
        sampling=_resolved_sampling(conversation, event.sampling),
    )
    if event.response_id is not None:
        answer.pk = event.response_id
    answer.save(force_insert=True)
    conversation.leaf = answer
    conversations.mark_changed(conversation)
    if answer.state == Message.State.STREAMING:
        transaction.on_commit(lambda: _enqueue_or_fail(answer.pk))
    return answer


def _already_created(conversation: Conversation, response_id: UUID | None) -> Message | None:
    if response_id is None:
        return None
    stored = Message.objects.filter(pk=response_id).first()
    if stored is None:
        return None
    if stored.conversation_id != conversation.pk or stored.role != Message.Role.ASSISTANT:
        raise ProtocolError("id_in_use", "Choose another id for the response.", param="response_id")
    return stored


def _question(conversation: Conversation, message_id: UUID | None) -> Message:
    if message_id is not None:
        question: Message | None = conversations.find_message(
            conversation, message_id, param="previous_item_id"
        )
    else:
        question = conversation.leaf
    if question is None or question.role != Message.Role.USER:
        raise ProtocolError(
            "nothing_to_answer",
            "There is no user message to answer here. Send conversation.item.create first, or name the message.",
            param="previous_item_id",
        )
    return question


def _conversations_of_active_answers(owner: User) -> list[UUID]:
    """For each answer of the owner's that waits or is being made, its conversation; refused where they are many."""
    active = list(
        Message.objects.filter(conversation__owner=owner, state__in=Message.ACTIVE).values_list(
            "conversation_id", flat=True
        )
    )
    if len(active) >= settings.MAX_ACTIVE_RESPONSES:
        raise ProtocolError(
            "too_many_responses",
            f"{len(active)} of your answers are waiting or being written. Wait for one to end, or stop one.",
        )
    return active


def _resolved_sampling(conversation: Conversation, sampling: protocol.Sampling) -> dict[str, Any]:
    """The conversation's settings over the defaults, the response's over those, and always a seed.

    With the seed stored, an answer that has to be made again after a crash comes out the same.
    """
    resolved: dict[str, Any] = (
        settings.DEFAULT_SAMPLING | conversation.sampling | sampling.model_dump(exclude_none=True)
    )
    resolved.setdefault("seed", secrets.randbits(62))
    return resolved


def _dispatch_next(conversation: Conversation) -> None:
    """Enqueue the oldest waiting answer of a locked conversation, unless one is being made."""
    answers = conversation.messages.filter(role=Message.Role.ASSISTANT)
    if answers.filter(state=Message.State.STREAMING).exists():
        return
    answer = answers.filter(state=Message.State.DRAFT).order_by("created_at", "id").first()
    if answer is None:
        return
    answer.state = Message.State.STREAMING
    answer.save(update_fields=["state"])
    answer_id = answer.pk
    transaction.on_commit(lambda: _enqueue_or_fail(answer_id))


def _enqueue(answer_id: UUID) -> None:
    """Raises OperationalError (of kombu) or RedisError where the queue cannot be reached."""
    from chatapp.tasks import answer_turn

    if get_streams().mark_queued(answer_id):
        answer_turn.apply_async((str(answer_id),), retry=False)


def _enqueue_or_fail(answer_id: UUID) -> None:
    try:
        _enqueue(answer_id)
    except (OperationalError, RedisError):
        logger.exception("Could not enqueue turn %s", answer_id)
        fail(
            answer_id,
            ErrorDetail(code="queue_unavailable", message="The task queue cannot be reached. Try again."),
        )


def pick_up_abandoned() -> None:
    """Enqueue again the turns that nobody makes and that are not in the queue.

    Their worker died, the queue was lost, or what ended them could not be stored. Each worker calls this at its start
    and with each heartbeat; a turn that is enqueued twice is made once.
    """
    for answer_id in Message.objects.filter(state=Message.State.STREAMING).values_list("pk", flat=True):
        _enqueue(answer_id)
    waiting = Conversation.objects.filter(messages__state=Message.State.DRAFT).exclude(
        messages__state=Message.State.STREAMING
    )
    for conversation_id in list(waiting.distinct().values_list("pk", flat=True)):
        with transaction.atomic():
            _dispatch_next(Conversation.objects.select_for_update().get(pk=conversation_id))


def find(owner: User, answer_id: UUID) -> Message:
    answer = Message.objects.filter(
        pk=answer_id, conversation__owner=owner, role=Message.Role.ASSISTANT
    ).first()
    if answer is None:
        raise ProtocolError("not_found", "There is no such response.", param="response_id")
    return answer


def cancel(owner: User, answer_id: UUID) -> int:
    """Stop an answer: one that no worker has begun ends at once, one in the making within a token.

    Returns:
        The number of the last event that the answer had; its end comes after it.
    """
    answer = find(owner, answer_id)
    if not answer.is_active:
        raise ProtocolError("not_active", "This answer is already finished.", param="response_id")
    streams = get_streams()
    streams.request_cancel(answer_id)
    events = len(streams.read(answer_id))
    if events == 0:
        stopped = finish(answer_id, Message.State.STOPPED)
        # A worker that begins at this moment ends the stream itself.
        with contextlib.suppress(StaleWriter):
            if stopped is not None:
                _append_ending(stopped, after=0)
    return events


def finish(
    answer_id: UUID,
    state: Message.State,
    *,
    text: str = "",
    tokens: Sequence[int] = (),
    finish_reason: str = "",
    report: protocol.CacheReport | None = None,
    error: ErrorDetail | None = None,
) -> Message | None:
    """Store how an answer ended and dispatch the conversation's next one.

    Returns:
        The answer as stored; None where it was deleted meanwhile.
    """
    with transaction.atomic():
        conversation = Conversation.objects.select_for_update().filter(messages=answer_id).first()
        if conversation is None:
            return None
        answer = conversation.messages.get(pk=answer_id)
        if not answer.is_active:
            return answer
        answer.state = state
        answer.text = text
        answer.tokens = list(tokens)
        answer.finish_reason = finish_reason
        answer.report = report and report.model_dump(mode="json")
        answer.error = error and error.model_dump(mode="json")
        answer.save()
        conversations.mark_changed(conversation)
        _dispatch_next(conversation)
    return answer


def fail(answer_id: UUID, error: ErrorDetail) -> None:
    """End an answer that no worker holds."""
    answer = finish(answer_id, Message.State.FAILED, error=error)
    if answer is None:
        return
    try:
        _append_ending(answer, after=len(get_streams().read(answer_id)))
    except RedisError:
        # Followers find the end in the database.
        logger.warning("Turn %s has no end in its stream", answer_id, exc_info=True)


def _append_ending(answer: Message, after: int) -> None:
    get_streams().append(answer.pk, [ending(answer, after + 1)])
    wakeups.turn_grew(answer.pk)


def ending(answer: Message, sequence_number: int) -> Entry:
    """The stream's last entry, made from the stored answer."""
    done = protocol.ResponseDone(
        response_id=answer.pk, sequence_number=sequence_number, response=to_protocol(answer)
    )
    return Entry(done.model_dump(mode="json"))


def to_protocol(answer: Message) -> protocol.Response:
    status = _STATUS[answer.state]
    if status == "completed" and answer.finish_reason == "length":
        status = "incomplete"
    return protocol.Response(
        id=answer.pk,
        conversation=answer.conversation_id,
        status=status,
        output=[conversations.item_to_protocol(answer)],
    )
