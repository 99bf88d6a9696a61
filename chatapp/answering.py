"""Making one answer, in the worker: read the branch, plan the context, run the engine, write the turn's stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID

from django.db import DatabaseError, connection
from redis.exceptions import RedisError

from chatapp import conversations, engine_host, protocol, turns, wakeups, workers
from chatapp.dialog import ContextPlan, plan_context
from chatapp.models import Message
from chatapp.protocol import CacheReport, ErrorDetail
from chatapp.streams import Entry, StaleWriter, get_streams
from chatapp.text import storable
from inference import (
    ChatMessage,
    Engine,
    EngineStopped,
    FinishedEvent,
    GenerationRequest,
    ModelUnavailable,
    PromptRefused,
    SamplingParams,
    TokenEvent,
    Usage,
)

logger = logging.getLogger(__name__)

# How often a turn that gets no tokens (it waits, or reads a long prompt) looks whether it was cancelled.
_CANCEL_POLL_SECONDS = 0.2
# The part of the context that is kept free for the answer, where the answer's own limit is not smaller.
_ANSWER_SHARE = 0.25


class _Cancelled(Exception):
    """The turn was cancelled before the engine had it."""


class _TurnWriter:
    """This worker's end of the turn's stream: numbers the events and remembers what they add up to.

    After a redelivery it begins where the log ends, and ``text`` and ``tokens`` are what the log holds.
    """

    def __init__(self, turn: UUID) -> None:
        self._turn = turn
        self._streams = get_streams()
        log = self._streams.read(turn)
        self._length = len(log)
        self.text = "".join(entry.event.get("delta", "") for entry in log)
        self.tokens = [token for entry in log for token in entry.tokens]
        self.cancel_requested = False

    @property
    def next_number(self) -> int:
        return self._length + 1

    def begin(self) -> None:
        if self._length == 0:
            event = protocol.ResponseInProgress(response_id=self._turn, sequence_number=1)
            self._append([Entry(event.model_dump(mode="json"))])
        else:
            self.poll_cancel()

    def delta(self, text: str, tokens: Sequence[int], sampled_at: float) -> None:
        self._append([self._delta(text, tokens, sampled_at)])

    def end(self, answer: Message, tail: Sequence[Entry], report: CacheReport | None) -> None:
        """Append the last events, together: a log has an end and all that leads to it, or can be gone on with."""
        entries = list(tail)
        if report is not None:
            reported = protocol.CacheReported(
                response_id=self._turn, sequence_number=self.next_number + len(entries), report=report
            )
            entries.append(Entry(reported.model_dump(mode="json")))
        self._append([*entries, turns.ending(answer, self.next_number + len(entries))])

    def tail(self, text: str, tokens: Sequence[int], sampled_at: float) -> list[Entry]:
        """The entry of a text that the engine held back until the end, to be appended with the end."""
        if not text:
            self.tokens.extend(tokens)
            return []
        return [self._delta(text, tokens, sampled_at)]

    def _delta(self, text: str, tokens: Sequence[int], sampled_at: float) -> Entry:
        text = storable(text)
        self.text += text
        self.tokens.extend(tokens)
        event = protocol.OutputTextDelta(
            response_id=self._turn, sequence_number=self.next_number, delta=text, sampled_at=sampled_at
        )
        return Entry(event.model_dump(mode="json"), tuple(tokens))

    def poll_cancel(self) -> None:
        self.cancel_requested = self._streams.cancel_requested(self._turn)

    def _append(self, entries: list[Entry]) -> None:
        self.cancel_requested = self._streams.append(self._turn, entries)
        self._length += len(entries)
        wakeups.turn_grew(self._turn)


def answer(answer_id: UUID) -> None:
    """Make the answer, from where an earlier delivery of the task left it; nothing if it is not wanted any more.

    A turn whose database, stream or engine fails under it is left as it is: some worker picks it up again.
    """
    try:
        with workers.holding(answer_id) as is_mine:
            message = Message.objects.select_related("conversation").filter(pk=answer_id).first()
            if is_mine and message is not None and message.state == Message.State.STREAMING:
                _answer(message, _TurnWriter(answer_id))
    except EngineStopped:
        logger.info("Turn %s goes on when there is a worker again", answer_id)
    except StaleWriter:
        logger.warning("Turn %s was deleted, or its stream was lost or is another worker's", answer_id)
    except (DatabaseError, RedisError):
        logger.exception("Turn %s cannot be stored now; it will be tried again", answer_id)


def _answer(message: Message, writer: _TurnWriter) -> None:
    try:
        _generate(message, writer)
    except _Cancelled:
        _end(writer, message, Message.State.STOPPED)
    except ModelUnavailable as unavailable:
        _fail(writer, message, "model_unavailable", unavailable.message)
    except PromptRefused as refused:
        _fail(writer, message, "prompt_refused", str(refused))
    except (EngineStopped, StaleWriter, DatabaseError, RedisError):
        raise
    except Exception:
        logger.exception("Turn %s failed", message.pk)
        _fail(
            writer,
            message,
            "internal_error",
            "Something went wrong on the server; its log says what. Try again.",
        )


def _generate(message: Message, writer: _TurnWriter) -> None:
    engine = engine_host.get()
    _wait_for_model(engine, writer)
    sampling = _sampling_params(message)
    plan = _plan(engine, message, sampling)
    generation = engine.submit(
        GenerationRequest(
            id=str(message.pk),
            owner=str(message.conversation.owner_id),
            session_id=str(message.conversation_id),
            spans=plan.spans,
            generated=tuple(writer.tokens),
            sampling=sampling,
        )
    )
    # The answer takes its time; a pooled connection is not held meanwhile.
    connection.close()
    try:
        writer.begin()
        while True:
            if writer.cancel_requested:
                generation.cancel()
            event = generation.next_event(_CANCEL_POLL_SECONDS)
            if event is None:
                writer.poll_cancel()
            elif isinstance(event, TokenEvent):
                writer.delta(event.text, event.token_ids, event.sampled_at)
            else:
                break
    finally:
        generation.cancel()
    if isinstance(event, FinishedEvent):
        _finish(writer, message, event, plan)
    elif event.code == "engine_stopped":
        raise EngineStopped(event.message)
    else:
        _fail(writer, message, event.code, event.message)


def _wait_for_model(engine: Engine, writer: _TurnWriter) -> None:
    while not writer.cancel_requested:
        if engine.wait_until_ready(_CANCEL_POLL_SECONDS):
            return
        writer.poll_cancel()
    raise _Cancelled


def _sampling_params(message: Message) -> SamplingParams:
    sampling = message.sampling or {}
    return SamplingParams(
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        seed=sampling["seed"],
        max_tokens=sampling["max_output_tokens"],
        stop=tuple(sampling["stop"]),
    )


def _plan(engine: Engine, message: Message, sampling: SamplingParams) -> ContextPlan:
    reserved = int(engine.context_length * _ANSWER_SHARE)
    if sampling.max_tokens is not None:
        reserved = min(reserved, sampling.max_tokens)
    return plan_context(
        _chat_messages(message), engine.chat_format.render, budget=engine.context_length - reserved
    )


def _chat_messages(answer: Message) -> list[ChatMessage]:
    """The branch above an answer, as the chat template wants it: roles alternate, nothing is empty."""
    chat: list[ChatMessage] = []
    if answer.conversation.system_prompt.strip():
        chat.append(ChatMessage("system", "system", answer.conversation.system_prompt))
    for message in conversations.branch_to(answer)[:-1]:
        is_answer = message.role == Message.Role.ASSISTANT
        if is_answer and not message.text:
            continue
        if chat and chat[-1].role == message.role:
            # An answer between them failed or was stopped at once.
            before = chat.pop()
            chat.append(ChatMessage(before.source, before.role, f"{before.text}\n\n{message.text}"))
            continue
        tokens = tuple(message.tokens) if is_answer and message.tokens else None
        chat.append(ChatMessage(str(message.pk), "assistant" if is_answer else "user", message.text, tokens))
    return chat


def _finish(writer: _TurnWriter, message: Message, event: FinishedEvent, plan: ContextPlan) -> None:
    tail = writer.tail(event.text, event.token_ids, event.usage.finished_at)
    if (message.sampling or {})["stop"]:
        # The text may be cut at a stop string, in the middle of what the tokens say: the text counts.
        writer.tokens.clear()
    state = Message.State.STOPPED if event.reason == "cancelled" else Message.State.DONE
    report = _report(event.usage, plan)
    _end(writer, message, state, tail=tail, finish_reason=event.reason, report=report)


def _report(usage: Usage, plan: ContextPlan) -> CacheReport:
    return CacheReport(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        completion_tokens=usage.completion_tokens,
        left_out_messages=plan.left_out,
        exactness=usage.exactness,
        time_to_first_token=usage.time_to_first_token,
        tokens_per_second=usage.tokens_per_second,
        submitted_at=usage.submitted_at,
        first_token_at=usage.first_token_at,
        finished_at=usage.finished_at,
    )


def _fail(writer: _TurnWriter, message: Message, code: str, text: str) -> None:
    _end(writer, message, Message.State.FAILED, error=ErrorDetail(code=code, message=text))


def _end(
    writer: _TurnWriter,
    message: Message,
    state: Message.State,
    *,
    tail: Sequence[Entry] = (),
    finish_reason: str = "",
    report: CacheReport | None = None,
    error: ErrorDetail | None = None,
) -> None:
    """Store the answer, then end its stream: who reads the end finds the answer stored."""
    stored = turns.finish(
        message.pk,
        state,
        text=writer.text,
        tokens=writer.tokens,
        finish_reason=finish_reason,
        report=report,
        error=error,
    )
    if stored is not None:
        writer.end(stored, tail, report)
