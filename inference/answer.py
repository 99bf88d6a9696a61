"""The state of one answer while it is generated."""

from __future__ import annotations

import secrets

from inference.chat_format import ChatFormat
from inference.events import FinishedEvent, FinishReason, TokenEvent, Usage
from inference.generation import Generation
from inference.requests import GenerationRequest
from inference.text_stream import TextStream
from kvstore import Session

SEED_BITS = 63


class Answer:
    """A request with all that is known of its answer. Used by the engine's thread alone.

    `tokens` are the prompt's and the answer's so far. Those whose KV the session holds are computed; the rest is still
    to run through the model, and when nothing is left the next token can be sampled.
    """

    def __init__(
        self,
        request: GenerationRequest,
        generation: Generation,
        chat_format: ChatFormat,
        end_tokens: frozenset[int],
        context_length: int,
    ) -> None:
        prompt = [token for span in request.spans for token in span.tokens]
        self.request = request
        self.generation = generation
        self.prompt_length = len(prompt)
        self.tokens = [*prompt, *request.generated]
        seed = request.sampling.seed
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self._end_tokens = end_tokens
        self._limit = self._token_limit(context_length)
        self._stream = TextStream(chat_format.decode, (*request.sampling.stop, *chat_format.stop))
        self._stream.replay(request.generated)
        self._session: Session | None = None
        self._cached = 0
        self._known = 0  # tokens known when sampling began
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._sampled = 0

    @property
    def session_key(self) -> tuple[str, str] | None:
        """Owner and id of the session, None when no KV is kept."""
        if self.request.session_id is None:
            return None
        return self.request.owner, self.request.session_id

    @property
    def session(self) -> Session:
        """The session; there is one from `begin` to `end_session`."""
        assert self._session is not None
        return self._session

    @property
    def planned_length(self) -> int:
        """Tokens that the session has room reserved for: the prompt's, and the answer's up to its limit, which is
        `max_tokens` or, where that is less, what the context leaves."""
        return self.prompt_length + self._limit

    @property
    def completion_length(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens still to run through the model before the next can be sampled."""
        return len(self.tokens) - self.session.length

    @property
    def prefilling(self) -> bool:
        """Whether more than one token is to run, so that it is done in chunks."""
        return self.remaining > 1

    @property
    def complete(self) -> FinishReason | None:
        """Why the answer is over, if its tokens say so."""
        if self._stream.stopped:
            return "stop"
        return "length" if self.completion_length >= self._limit else None

    def begin(self, session: Session) -> None:
        """Take a session that holds the first of the tokens."""
        self._session = session
        self._cached = session.length
        self._known = len(self.tokens)

    def lose(self, length: int) -> None:
        """KV past `length` tokens, which was to be restored, is lost; it is computed again."""
        self.session.truncate(length)
        self._cached = length

    def end_session(self) -> Session | None:
        """Give the session back, if there is one."""
        session, self._session = self._session, None
        return session

    def next_chunk(self, limit: int) -> list[int]:
        """The next tokens to run, at most `limit`."""
        start = self.session.length
        return self.tokens[start : start + limit]

    def accept(self, token: int, sampled_at: float) -> FinishReason | None:
        """Add a sampled token and publish the text that it completes. Returns why the answer is over, if it is."""
        self._first_token_at = self._first_token_at or sampled_at
        self._last_token_at = sampled_at
        self._sampled += 1
        if token in self._end_tokens:
            return "stop"
        self.tokens.append(token)
        if piece := self._stream.push(token):
            self.generation.publish(TokenEvent(piece.text, piece.tokens, sampled_at))
        return self.complete

    def finished(self, reason: FinishReason, now: float) -> FinishedEvent:
        """The event that ends the answer."""
        rest = self._stream.finish()
        return FinishedEvent(reason, self._usage(now), rest.text, rest.tokens)

    def _usage(self, now: float) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_length,
            cached_tokens=self._cached,
            computed_tokens=self._known - self._cached,
            completion_tokens=self.completion_length,
            submitted_at=self.generation.submitted_at,
            first_token_at=self._first_token_at,
            finished_at=now,
            exactness=self._session.exactness if self._session else "exact",
            tokens_per_second=self._rate(),
        )

    def _rate(self) -> float | None:
        if self._first_token_at is None or self._last_token_at is None:
            return None
        seconds = self._last_token_at - self._first_token_at
        return (self._sampled - 1) / seconds if seconds > 0 else None

    def _token_limit(self, context_length: int) -> int:
        room = context_length - self.prompt_length
        wanted = self.request.sampling.max_tokens
        return room if wanted is None else min(room, wanted)
