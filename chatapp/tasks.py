"""The Celery tasks. The web process imports this module to enqueue them, so what they do is imported when they run."""

from __future__ import annotations

from uuid import UUID

from celery import shared_task


@shared_task(name="keepwarm.answer_turn")
def answer_turn(answer_id: str) -> None:
    """Make one answer; a task that is delivered twice goes on where the first delivery stopped."""
    from chatapp import answering

    answering.answer(UUID(answer_id))


@shared_task(name="keepwarm.forget_conversation")
def forget_conversation(conversation_id: str, owner_id: int) -> None:
    """Drop the KV of a deleted conversation; on another worker it goes when its memory is needed."""
    from chatapp import engine_host

    engine_host.get().drop_session(conversation_id, str(owner_id))
