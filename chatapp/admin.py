"""The admin's tables. Staff see whose conversation it is and how it went, not what was written."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse

from chatapp import conversations
from chatapp.models import Conversation, Message, User

admin.site.site_title = admin.site.site_header = "Keepwarm"
admin.site.register(User, UserAdmin)


class _ReadOnlyAdmin(admin.ModelAdmin):
    def has_add_permission(self, *_: object) -> bool:
        return False

    def has_change_permission(self, *_: object) -> bool:
        return False


@admin.register(Conversation)
class ConversationAdmin(_ReadOnlyAdmin):
    """Deleting goes the owner's way, so that answers in the making end and nothing of it is kept."""

    list_display = ("id", "owner", "created_at", "updated_at")
    list_filter = ("updated_at",)
    search_fields = ("id", "owner__username")
    fields = ("id", "owner", "sampling", "created_at", "updated_at", "version")

    def delete_model(self, request: HttpRequest, obj: Conversation) -> None:
        conversations.delete(obj.owner, obj.pk)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Conversation]) -> None:
        for conversation in queryset.select_related("owner"):
            conversations.delete(conversation.owner, conversation.pk)


@admin.register(Message)
class MessageAdmin(_ReadOnlyAdmin):
    list_display = ("id", "conversation", "role", "state", "created_at")
    list_filter = ("role", "state", "created_at")
    search_fields = ("id", "conversation__id")
    fields = ("id", "conversation", "role", "state", "created_at", "report", "error")
    list_select_related = ("conversation",)

    def has_delete_permission(self, request: HttpRequest, obj: Message | None = None) -> bool:
        # Alone it would break the tree, and might leave a conversation waiting for it; with its conversation it may go.
        return not request.path.startswith(reverse("admin:chatapp_message_changelist"))
