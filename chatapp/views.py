"""The pages: the chat, and the accounts' pages. What the chat shows it gets over the websocket."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login, update_session_auth_hash
from django.contrib.auth.forms import PasswordChangeForm, SetPasswordForm
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.views import LoginView
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse, reverse_lazy
from django.utils.translation import gettext as _
from django.views.generic import FormView, TemplateView, View

from chatapp.accounts import user_of_link
from chatapp.forms import SignUpForm
from chatapp.models import User

_BACKEND = "django.contrib.auth.backends.ModelBackend"


class ChatView(LoginRequiredMixin, TemplateView):
    """The one page of the chat; the address names the conversation that it opens."""

    template_name = "chat/chat.html"

    def get_context_data(self, conversation: UUID | None = None, **kwargs: Any) -> dict[str, Any]:
        chat_data = {
            "conversation": str(conversation) if conversation else None,
            "chatUrl": reverse("chat"),
            "conversationUrl": reverse("chat") + "c/",
            "isStaff": self.request.user.is_staff,
        }
        return super().get_context_data(
            conversation_id=str(conversation or ""), chat_data=chat_data, **kwargs
        )


class SignInView(LoginView):
    template_name = "accounts/sign_in.html"
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(sign_up_allowed=settings.SIGN_UP_ALLOWED, **kwargs)


class OneTimeSignInView(View):
    """Signs in whoever holds an unused link, as a notebook server does on its owner's machine."""

    def get(self, request: HttpRequest, user: str, token: str) -> HttpResponse:
        owner = user_of_link(user, token)
        if owner is None:
            if not request.user.is_authenticated:
                messages.error(
                    request, _("This link was used or has expired. Ask for a new one, or sign in.")
                )
            return redirect("chat")
        login(request, owner, backend=_BACKEND)
        return redirect("chat")


class SignUpView(FormView):
    template_name = "accounts/sign_up.html"
    form_class = SignUpForm
    success_url = reverse_lazy("chat")

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not settings.SIGN_UP_ALLOWED:
            raise Http404
        if request.user.is_authenticated:
            return redirect("chat")
        return super().dispatch(request, *args, **kwargs)

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(sign_up_allowed=True, **kwargs)

    def form_valid(self, form: SignUpForm) -> HttpResponse:
        login(self.request, form.save(), backend=_BACKEND)
        return super().form_valid(form)


class PasswordView(LoginRequiredMixin, FormView):
    """Change the password, or set the first one of an account that was made without."""

    template_name = "accounts/password.html"
    success_url = reverse_lazy("chat")

    def get_form_class(self) -> type[SetPasswordForm]:
        return PasswordChangeForm if self._has_password() else SetPasswordForm

    def get_form_kwargs(self) -> dict[str, Any]:
        return super().get_form_kwargs() | {"user": self.request.user}

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(has_password=self._has_password(), **kwargs)

    def _has_password(self) -> bool:
        return cast(User, self.request.user).has_usable_password()

    def form_valid(self, form: Any) -> HttpResponse:
        user = form.save()
        # The sessions of other browsers end; this one goes on.
        update_session_auth_hash(self.request, user)
        messages.success(self.request, _("Your password is set."))
        return super().form_valid(form)
