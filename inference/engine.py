"""The engine: one thread that owns a model and its KV store, and serves any number of callers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from inference.answer import Answer
from inference.chat_format import ChatFormat
from inference.config import EngineConfig
from inference.errors import EngineStopped, ModelUnavailable
from inference.events import FailedEvent, FailureCode, FinishedEvent, FinishReason
from inference.generation import Generation
from inference.kv import open_store
from inference.loading import LoadedModel, load
from inference.requests import GenerationRequest
from inference.sampling import sample_token
from inference.scheduler import Scheduler
from inference.session_cache import SessionCache
from inference.sources import display_name, model_folder
from inference.status import EngineSnapshot, EngineStatus, State
from kvstore import KVLost, KVStore, Session

logger = logging.getLogger(__name__)

# Between two looks at the store's sessions when nothing else is to be done.
HOUSEKEEPING_SECONDS = 1.0
SCAN_SECONDS = 10.0
# That an engine which is shut down waits for KV to be written.
STOP_SECONDS = 20.0
STOPPED = FailedEvent("engine_stopped", "The engine was stopped.")


class _Stopping(Exception):
    """Ends the preparation of the model when the engine is shut down meanwhile."""


class Engine:
    """Generates answers. Every method and property may be used from any thread.

    The engine's thread works in passes: each computes one chunk of one prompt and one token of every answer that is
    past its prompt, so nobody waits for the whole of another's prompt or answer. How many answers run side by side is
    bounded by `max_running`, and by `kv_bytes`: an answer begins when its prompt, and as many tokens as it may have,
    fit beside the same of those that run.
    """

    def __init__(
        self, config: EngineConfig, *, on_status: Callable[[EngineStatus], None] | None = None
    ) -> None:
        """`on_status` is called from the engine's thread with each new status."""
        self.config = config
        self._on_status = on_status
        self._name = display_name(config.model)
        self._thread = threading.Thread(target=self._run, name="inference-engine", daemon=True)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._scheduler = Scheduler(config.max_running)
        self._loaded: LoadedModel | None = None
        self._store: KVStore | None = None
        self._ticked_at = 0.0
        # Guards the three below. Once `_closed` is set, no generation is opened and none is left open.
        self._changed = threading.Condition()
        self._status = EngineStatus("starting", 0.0, self._name, "starting")
        self._open: set[Generation] = set()
        self._closed: FailedEvent | None = None

    def start(self) -> None:
        """Load the model and serve, in the background. Returns at once. Raises RuntimeError when called twice."""
        self._thread.start()

    @property
    def status(self) -> EngineStatus:
        """How far the engine is."""
        return self._status

    def wait_until_ready(self, timeout: float | None = None) -> bool:
        """Wait until requests are served. Returns False after `timeout` seconds; raises ModelUnavailable when the
        model cannot be loaded or the engine has failed, and EngineStopped when it was shut down."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.state in ("ready", "failed"), timeout)
            if self._status.state == "failed":
                if self._closed is STOPPED:
                    raise EngineStopped(self._status.detail)
                raise ModelUnavailable(self._status.detail)
            return self._status.state == "ready"

    @property
    def chat_format(self) -> ChatFormat:
        """The model's way to write conversations. Raises RuntimeError before the engine is ready."""
        return self._model.chat_format

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together. Raises RuntimeError before the engine is ready."""
        return self._model.context_length

    def submit(self, request: GenerationRequest) -> Generation:
        """Begin an answer. Returns at once; whatever goes wrong later is an event. A request that comes before the
        model is loaded waits for it."""
        generation = Generation(request.id, self._wake)
        with self._changed:
            if self._closed is not None:
                generation.publish(self._closed)
                return generation
            self._open.add(generation)
            self._commands.put(lambda: self._receive(request, generation))
        return generation

    def drop_session(self, session_id: str, owner: str) -> None:
        """Forget a session's KV; if an answer is using it, once that is over."""
        self._commands.put(lambda: self._kv.drop(owner, session_id))

    def snapshot(self) -> EngineSnapshot:
        """The engine's load."""
        with self._changed:
            running = self._scheduler.running
            waiting = max(0, len(self._open) - running)
        return EngineSnapshot(running, waiting, self._store.snapshot() if self._store else None)

    def shutdown(self) -> None:
        """Stop. Answers that are not over fail with "engine_stopped". Returns when the engine's thread has ended."""
        self._stopping.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._close(STOPPED)

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise RuntimeError("the engine is not ready")
        return self._loaded

    def _wake(self) -> None:
        self._commands.put(lambda: None)

    def _run(self) -> None:
        try:
            self._prepare()
            self._serve()
        except _Stopping:
            pass
        except ModelUnavailable as error:
            self._close(FailedEvent("model_unavailable", error.message))
        except Exception as error:
            logger.critical("the engine has failed", exc_info=True)
            code: FailureCode = "model_unavailable" if self._loaded is None else "engine_error"
            self._close(FailedEvent(code, f"The engine has failed: {error!r}"))
        else:
            self._close(STOPPED)
        finally:
            self._put_away()

    def _close(self, failure: FailedEvent) -> None:
        """End every generation and refuse new ones."""
        with self._changed:
            if self._closed is not None:
                return
            self._closed = failure
            left, self._open = self._open, set()
        for generation in left:
            generation.publish(failure)
        self._set_status("failed", 0.0, failure.message)

    def _set_status(self, state: State, progress: float, detail: str) -> None:
        length = self._loaded.context_length if self._loaded and state == "ready" else None
        status = EngineStatus(state, progress, self._name, detail, length)
        with self._changed:
            self._status = status
            self._changed.notify_all()
        if self._on_status is not None:
            try:
                self._on_status(status)
            except Exception:
                logger.exception("on_status failed")

    # From here on, everything runs in the engine's thread.

    def _prepare(self) -> None:
        torch.set_num_threads(self.config.threads or _default_threads())
        folder = model_folder(self.config.model, self.config.cache_dir, self._report)
        self._report_loading()
        loaded = load(folder, self.config)
        self._store = open_store(self.config, loaded, self._wake)
        # So that the first turn finds what earlier processes left; a slow tier may come in later.
        self._store.flush(SCAN_SECONDS)
        self._loaded = loaded
        self._set_status("ready", 1.0, "ready")

    def _report(self, step: str, progress: float) -> None:
        if self._stopping.is_set():
            raise _Stopping
        self._set_status("converting", progress, step)

    def _report_loading(self) -> None:
        if self._stopping.is_set():
            raise _Stopping
        self._set_status("loading", 0.0, "loading the model")

    def _put_away(self) -> None:
        """Close the store. Sessions of unfinished answers sleep like the others, since they are the first to go on."""
        if self._store is not None:
            try:
                for answer in self._scheduler.admitted():
                    if session := answer.end_session():
                        self._store.release(session)
            finally:
                self._store.close(STOP_SECONDS)

    @torch.inference_mode()
    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._run_commands()
            self._keep_house()
            for answer in self._scheduler.cancelled():
                self._finish(answer, "cancelled")
            while admitted := self._scheduler.admit(self._fits):
                self._guarded(self._begin, admitted)
            self._pass()

    def _run_commands(self) -> None:
        """Run what other threads asked for; wait for it when there is nothing else to do."""
        if self._scheduler.idle:
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=HOUSEKEEPING_SECONDS)()
        while not self._commands.empty():
            self._commands.get()()

    def _keep_house(self) -> None:
        """Let the store take in what its background threads did, and once in a while look after its sessions."""
        now = time.monotonic()
        if now - self._ticked_at >= HOUSEKEEPING_SECONDS:
            self._ticked_at = now
            self._kv.tick()
        else:
            self._kv.poll()

    def _pass(self) -> None:
        if answer := self._scheduler.next_prefill():
            self._guarded(self._advance, answer)
        for answer in self._scheduler.decoding():
            self._guarded(self._advance, answer)

    def _guarded(self, step: Callable[[Answer], None], answer: Answer) -> None:
        """Take a step of one answer. If it raises, this answer fails and the others go on."""
        try:
            step(answer)
        except Exception as error:
            logger.exception("answer %s has failed", answer.generation.id)
            self._end(answer, FailedEvent("engine_error", f"The answer could not be generated: {error}"))

    def _receive(self, request: GenerationRequest, generation: Generation) -> None:
        model = self._model
        room = min(model.context_length, self._kv.capacity_tokens)
        answer = Answer(request, generation, model.chat_format, model.end_tokens, room)
        if failure := self._refusal(answer):
            self._publish_end(generation, failure)
        elif reason := answer.complete:
            self._publish_end(generation, answer.finished(reason, time.time()))
        else:
            self._scheduler.add(answer)

    def _refusal(self, answer: Answer) -> FailedEvent | None:
        """Why a request cannot be served, if so."""
        context, size = self._model.context_length, self._model.vocabulary_size
        if answer.prompt_length >= context:
            return FailedEvent(
                "context_length_exceeded",
                f"The prompt has {answer.prompt_length:,} tokens, and the model's context of {context:,} must hold"
                " the prompt and at least one token of the answer.",
            )
        capacity = self._kv.capacity_tokens
        if answer.prompt_length >= capacity:
            return FailedEvent(
                "context_length_exceeded",
                f"The prompt has {answer.prompt_length:,} tokens, and the memory for KV holds {capacity:,} for"
                " prompt and answer together.",
            )
        if not all(0 <= token < size for token in answer.tokens):
            return FailedEvent("engine_error", "The prompt has tokens that the model does not know.")
        return None

    def _fits(self, answer: Answer) -> bool:
        return self._kv.fits(answer.request.owner, answer.request.session_id, answer.planned_length)

    def _begin(self, answer: Answer) -> None:
        # The last token always runs through the model: its logits choose the next one.
        reusable = answer.tokens[:-1]
        request = answer.request
        session = self._kv.acquire(
            request.owner,
            request.session_id,
            reusable,
            planned=answer.planned_length,
            sources=[(span.source, len(span.tokens)) for span in request.spans],
            wait=False,
        )
        answer.begin(session)

    def _advance(self, answer: Answer) -> None:
        if answer.generation.cancelled:
            self._finish(answer, "cancelled")
            return
        try:
            logits = self._forward(answer.session, answer.next_chunk(self.config.prefill_chunk))
        except KVLost as lost:
            answer.lose(lost.length)
            return
        if answer.remaining:
            return
        token = sample_token(logits, answer.request.sampling, answer.seed, answer.completion_length)
        if reason := answer.accept(token, time.time()):
            self._finish(answer, reason)

    def _forward(self, session: Session, tokens: Sequence[int]) -> torch.Tensor:
        """Run the session's next tokens through the model. Returns the last one's logits, `[vocabulary]`."""
        input_ids = torch.tensor([tokens], device=self._model.device)
        output = self._model.model(
            input_ids=input_ids, cache=SessionCache(session), use_cache=True, logits_to_keep=1
        )
        session.commit(tokens)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        self._end(answer, answer.finished(reason, time.time()))

    def _end(self, answer: Answer, event: FinishedEvent | FailedEvent) -> None:
        # The session is free before the caller hears of the end, so a next turn finds it.
        self._scheduler.remove(answer)
        if session := answer.end_session():
            self._kv.release(session)
        self._publish_end(answer.generation, event)

    def _publish_end(self, generation: Generation, event: FinishedEvent | FailedEvent) -> None:
        with self._changed:
            self._open.discard(generation)
        generation.publish(event)

    @property
    def _kv(self) -> KVStore:
        assert self._store is not None
        return self._store


def _default_threads() -> int:
    """All cores that this process may use but one, which is left to the web side.

    A step of one answer is bound by memory and hardly gains from a second core (63 and 70 ms on two), while a thread
    that shares its core with the web side makes all others wait for it.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1)
