"""The websocket protocol, version 1: every event that may cross the socket.

Names follow the OpenAI Realtime API for text where it has one; our own begin with ``keepwarm.``.
docs/protocol.md is the same for people, with examples. This module knows neither Django nor the database.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

PROTOCOL_VERSION = 1

TITLE_MAX_LENGTH = 200
SYSTEM_PROMPT_MAX_LENGTH = 20_000
SEARCH_MAX_LENGTH = 200
EVENT_ID_MAX_LENGTH = 128
STOP_STRINGS_MAX = 4

MessageState = Literal["draft", "streaming", "done", "stopped", "failed"]
FinishReason = Literal["stop", "length", "cancelled"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

Title = Annotated[str, StringConstraints(strip_whitespace=True, max_length=TITLE_MAX_LENGTH)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00]*$")]
SystemPrompt = Annotated[str, StringConstraints(max_length=SYSTEM_PROMPT_MAX_LENGTH)]


class ProtocolError(Exception):
    """A client's event that cannot be carried out. Becomes an ``error`` event; the socket stays open."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class Sampling(BaseModel):
    """How the answer's tokens are drawn. What is left out is taken from the conversation, then the default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1_000_000)
    seed: int | None = Field(None, ge=0, lt=2**63)
    max_output_tokens: int | None = Field(None, ge=1, le=1_000_000)
    stop: list[StopString] | None = Field(None, max_length=STOP_STRINGS_MAX)


# --- What a client sends ------------------------------------------------------------------------


class ClientEvent(BaseModel):
    """Base of every client event. ``event_id`` comes back in ``in_reply_to`` or in the error."""

    model_config = ConfigDict(extra="forbid")

    event_id: str | None = Field(None, max_length=EVENT_ID_MAX_LENGTH)


class InputText(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["input_text"]
    text: str


class InputItem(BaseModel):
    """A user message. A client that chooses ``id`` itself can send the event again after a lost connection."""

    model_config = ConfigDict(extra="forbid")

    id: UUID | None = None
    type: Literal["message"]
    role: Literal["user"]
    content: list[InputText] = Field(min_length=1, max_length=64)

    @property
    def text(self) -> str:
        return "\n\n".join(part.text for part in self.content)


class ItemCreate(ClientEvent):
    """Append a user message. ``previous_item_id`` None: after the last message of the shown branch."""

    type: Literal["conversation.item.create"]
    conversation: UUID
    previous_item_id: UUID | None = None
    item: InputItem


class ResponseCreate(ClientEvent):
    """Answer a user message (None: the last one of the shown branch). A second answer is a new branch."""

    type: Literal["response.create"]
    conversation: UUID
    previous_item_id: UUID | None = None
    response_id: UUID | None = None
    sampling: Sampling = Sampling()


class ResponseCancel(ClientEvent):
    type: Literal["response.cancel"]
    response_id: UUID


class Resume(ClientEvent):
    """Send the response's events after ``sequence_number`` (0: all), then go on as they come."""

    type: Literal["keepwarm.resume"]
    response_id: UUID
    sequence_number: int = Field(0, ge=0)


class Edit(ClientEvent):
    """Write a user message anew: a sibling of it starts a new branch, the old one stays."""

    type: Literal["keepwarm.edit"]
    conversation: UUID
    item_id: UUID
    item: InputItem


class Branch(ClientEvent):
    """Show the branch that goes through ``item_id`` (its most recent continuation)."""

    type: Literal["keepwarm.branch"]
    conversation: UUID
    item_id: UUID


class ConversationCreate(ClientEvent):
    """``id`` chosen by the client makes the event safe to send again."""

    type: Literal["keepwarm.conversation.create"]
    id: UUID | None = None
    title: Title = ""
    system_prompt: SystemPrompt = ""
    sampling: Sampling = Sampling()


class ConversationUpdate(ClientEvent):
    """Change what is given; None leaves it as it is. ``sampling`` replaces the whole set."""

    type: Literal["keepwarm.conversation.update"]
    conversation: UUID
    title: Title | None = None
    system_prompt: SystemPrompt | None = None
    sampling: Sampling | None = None


class ConversationDelete(ClientEvent):
    type: Literal["keepwarm.conversation.delete"]
    conversation: UUID


class ConversationList(ClientEvent):
    """Newest first; ``before`` is the ``next`` cursor of the page before. ``search``: in titles and messages."""

    type: Literal["keepwarm.conversation.list"]
    search: Annotated[str, StringConstraints(strip_whitespace=True, max_length=SEARCH_MAX_LENGTH)] = ""
    before: Annotated[str, StringConstraints(max_length=100)] | None = None
    limit: int = Field(50, ge=1, le=200)


class ConversationOpen(ClientEvent):
    """Read one conversation with all its messages."""

    type: Literal["keepwarm.conversation.open"]
    conversation: UUID


AnyClientEvent = Annotated[
    ItemCreate
    | ResponseCreate
    | ResponseCancel
    | Resume
    | Edit
    | Branch
    | ConversationCreate
    | ConversationUpdate
    | ConversationDelete
    | ConversationList
    | ConversationOpen,
    Field(discriminator="type"),
]
_client_events: TypeAdapter[AnyClientEvent] = TypeAdapter(AnyClientEvent)


def parse_client_event(data: Any) -> AnyClientEvent:
    """Check decoded JSON against the schemas.

    Raises:
        ProtocolError: ``unknown_event`` or ``invalid_event``, naming the field and the reason.
    """
    try:
        return _client_events.validate_python(data)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        raise ProtocolError(
            "unknown_event",
            "The event's type is missing or not one of this protocol; docs/protocol.md lists them.",
            param="type",
        )
    # The first element of a discriminated union's location is the tag itself.
    field = ".".join(str(part) for part in first["loc"][1:])
    raise ProtocolError("invalid_event", f"{field or 'event'}: {first['msg']}", param=field or None)


# --- What the server sends ----------------------------------------------------------------------


class ServerModel(BaseModel):
    model_config = ConfigDict(frozen=True)


class Text(ServerModel):
    type: Literal["input_text", "output_text"]
    text: str


class ErrorDetail(ServerModel):
    """``code`` is stable and for programs; ``message`` says in English what happened and what to do."""

    code: str
    message: str
    param: str | None = None
    event: str | None = None
    event_id: str | None = None


class CacheReport(ServerModel):
    """What an answer cost, counted in the engine. Tokens are counts; times are Unix seconds.

    ``cached_tokens + computed_tokens`` is ``prompt_tokens``; of an answer that was interrupted and taken up again, it
    is those and the tokens that the answer had by then.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    left_out_messages: int = 0
    exactness: Literal["exact", "quantized", "approximate"]
    time_to_first_token: float | None
    tokens_per_second: float | None
    submitted_at: float
    first_token_at: float | None
    finished_at: float


class Item(ServerModel):
    """A message. ``previous_item_id`` is its parent in the tree; None: the root of a branch."""

    id: UUID
    type: Literal["message"] = "message"
    role: Literal["user", "assistant"]
    state: MessageState
    content: list[Text]
    previous_item_id: UUID | None
    created_at: datetime
    finish_reason: FinishReason | None = None
    report: CacheReport | None = None
    error: ErrorDetail | None = None


class Response(ServerModel):
    """An answer in the making. Its id is the id of the message that it writes."""

    id: UUID
    conversation: UUID
    status: ResponseStatus
    output: list[Item]


class Conversation(ServerModel):
    id: UUID
    title: str
    system_prompt: str
    sampling: Sampling
    created_at: datetime
    updated_at: datetime
    version: int


class ModelStatus(ServerModel):
    """Where the engine is. ``progress`` runs from 0 to 1 within a state; ``absent``: no worker is running."""

    state: Literal["absent", "starting", "converting", "loading", "ready", "failed"]
    progress: float = 0.0
    model: str = ""
    detail: str = ""
    context_length: int | None = None


class Limits(ServerModel):
    message_characters: int
    event_bytes: int


class ServerEvent(ServerModel):
    """Base of every server event. ``in_reply_to`` is the ``event_id`` of the client event it answers."""

    in_reply_to: str | None = None


class SessionCreated(ServerEvent):
    """The first event on every socket."""

    type: Literal["session.created"] = "session.created"
    protocol: int = PROTOCOL_VERSION
    username: str
    model: ModelStatus
    limits: Limits


class Error(ServerEvent):
    type: Literal["error"] = "error"
    error: ErrorDetail


class ModelChanged(ServerEvent):
    type: Literal["keepwarm.model"] = "keepwarm.model"
    model: ModelStatus


class ItemAdded(ServerEvent):
    type: Literal["conversation.item.added"] = "conversation.item.added"
    conversation: UUID
    item: Item


class ConversationCreated(ServerEvent):
    type: Literal["keepwarm.conversation.created"] = "keepwarm.conversation.created"
    conversation: Conversation


class ConversationUpdated(ServerEvent):
    type: Literal["keepwarm.conversation.updated"] = "keepwarm.conversation.updated"
    conversation: Conversation


class ConversationDeleted(ServerEvent):
    type: Literal["keepwarm.conversation.deleted"] = "keepwarm.conversation.deleted"
    conversation: UUID


class ConversationListed(ServerEvent):
    type: Literal["keepwarm.conversation.listed"] = "keepwarm.conversation.listed"
    conversations: list[Conversation]
    next: str | None


class ConversationOpened(ServerEvent):
    """``items`` in order of creation, all branches; ``leaf`` is the last message of the shown branch."""

    type: Literal["keepwarm.conversation.opened"] = "keepwarm.conversation.opened"
    conversation: Conversation
    items: list[Item]
    leaf: UUID | None


class ConversationChanged(ServerEvent):
    """Something changed, perhaps in another tab: open it again where ``version`` is newer than what is shown."""

    type: Literal["keepwarm.conversation.changed"] = "keepwarm.conversation.changed"
    conversation: UUID
    version: int


class BranchSelected(ServerEvent):
    type: Literal["keepwarm.branch.selected"] = "keepwarm.branch.selected"
    conversation: UUID
    leaf: UUID


class ResponseCreated(ServerEvent):
    """The answer is in the queue; its events follow on this socket."""

    type: Literal["response.created"] = "response.created"
    response: Response


# The events below are in the turn's stream: numbered from 1 without gaps, kept, and sent again on resume.


class StreamEvent(ServerEvent):
    response_id: UUID
    sequence_number: int = Field(ge=1)


class ResponseInProgress(StreamEvent):
    type: Literal["response.in_progress"] = "response.in_progress"


class OutputTextDelta(StreamEvent):
    """A piece of the answer; never a split character. ``sampled_at``: Unix time of its last token."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    sampled_at: float


class CacheReported(StreamEvent):
    type: Literal["keepwarm.cache_report"] = "keepwarm.cache_report"
    report: CacheReport


class ResponseDone(StreamEvent):
    """The last event of a response, with the whole text."""

    type: Literal["response.done"] = "response.done"
    response: Response
