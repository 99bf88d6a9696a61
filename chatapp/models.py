"""What is stored: users, conversations, and the messages of a conversation as a tree.

A turn needs no table of its own: it is an answer's message from ``draft`` to its end, and the turn's id is that
message's id.
"""

from __future__ import annotations

import uuid

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from chatapp.protocol import TITLE_MAX_LENGTH


class User(AbstractUser):
    """An owner of conversations."""


class Conversation(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="conversations")
    title = models.CharField(_("title"), max_length=TITLE_MAX_LENGTH, blank=True)
    system_prompt = models.TextField(_("system prompt"), blank=True)
    sampling = models.JSONField(_("sampling"), default=dict, blank=True)
    # The last message of the branch that is shown.
    leaf = models.ForeignKey(
        "Message", models.SET_NULL, null=True, blank=True, editable=False, related_name="+"
    )
    # Counts changes, so that a client knows whether what it shows is old.
    version = models.PositiveBigIntegerField(default=0, editable=False)
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    updated_at = models.DateTimeField(_("updated"), default=timezone.now, editable=False)

    class Meta:
        verbose_name = _("conversation")
        verbose_name_plural = _("conversations")
        ordering = ["-updated_at", "-id"]
        indexes = [models.Index(fields=["owner", "-updated_at", "-id"])]

    def __str__(self) -> str:
        # Not the title: the admin shows this to people who may not read conversations.
        return str(self.id)


class Message(models.Model):
    class Role(models.TextChoices):
        USER = "user", _("user")
        ASSISTANT = "assistant", _("assistant")

    class State(models.TextChoices):
        DRAFT = "draft", _("waiting")
        STREAMING = "streaming", _("streaming")
        DONE = "done", _("done")
        STOPPED = "stopped", _("stopped")
        FAILED = "failed", _("failed")

    ACTIVE = (State.DRAFT, State.STREAMING)

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    conversation = models.ForeignKey(Conversation, models.CASCADE, related_name="messages")
    parent = models.ForeignKey("self", models.CASCADE, null=True, blank=True, related_name="children")
    role = models.CharField(_("role"), max_length=16, choices=Role.choices)
    state = models.CharField(_("state"), max_length=16, choices=State.choices, default=State.DONE)
    text = models.TextField(_("text"), blank=True)
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)

    # Of answers only: how its tokens are drawn (with the seed), the tokens, and how it ended.
    sampling = models.JSONField(null=True, blank=True, editable=False)
    tokens = models.JSONField(null=True, blank=True, editable=False)
    finish_reason = models.CharField(max_length=16, blank=True, editable=False)
    report = models.JSONField(_("cache report"), null=True, blank=True, editable=False)
    error = models.JSONField(_("error"), null=True, blank=True, editable=False)

    class Meta:
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        ordering = ["created_at", "id"]
        indexes = [
            models.Index(fields=["conversation", "created_at"]),
            models.Index(
                fields=["state"], condition=models.Q(state__in=["draft", "streaming"]), name="active_messages"
            ),
        ]
        constraints = [
            # Answers of one conversation are made one after the other.
            models.UniqueConstraint(
                fields=["conversation"],
                condition=models.Q(state="streaming"),
                name="one_streaming_answer",
            )
        ]

    def __str__(self) -> str:
        return f"{self.role} {self.id}"

    @property
    def is_active(self) -> bool:
        return self.state in self.ACTIVE
