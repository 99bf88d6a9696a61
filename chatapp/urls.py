"""Addresses of the pages. The websocket's is in chatapp/asgi.py."""

from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import path
from django.views.i18n import JavaScriptCatalog, set_language

from chatapp import views

urlpatterns = [
    path("", views.ChatView.as_view(), name="chat"),
    path("c/<uuid:conversation>/", views.ChatView.as_view(), name="conversation"),
    path("accounts/sign-in/", views.SignInView.as_view(), name="sign-in"),
    path(
        "accounts/sign-in/<str:user>/<str:token>/", views.OneTimeSignInView.as_view(), name="one-time-sign-in"
    ),
    path("accounts/sign-up/", views.SignUpView.as_view(), name="sign-up"),
    path("accounts/sign-out/", LogoutView.as_view(), name="sign-out"),
    path("accounts/password/", views.PasswordView.as_view(), name="password"),
    path("language/", set_language, name="set_language"),
    path("javascript-catalog/", JavaScriptCatalog.as_view(packages=["chatapp"]), name="javascript-catalog"),
    path("admin/", admin.site.urls),
]
