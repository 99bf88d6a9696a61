"""The admin's tables. Staff see whose conversation it is and how it went, not what was written."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin

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
    list_display = ("id", "owner", "created_at", "updated_at")
    list_filter = ("updated_at",)
    search_fields = ("id", "owner__username")
    fields = ("id", "owner", "sampling", "created_at", "updated_at", "version")


@admin.register(Message)
class MessageAdmin(_ReadOnlyAdmin):
    list_display = ("id", "conversation", "role", "state", "created_at")
    list_filter = ("role", "state", "created_at")
    search_fields = ("id", "conversation__id")
    fields = ("id", "conversation", "role", "state", "created_at", "report", "error")
    list_select_related = ("conversation",)
