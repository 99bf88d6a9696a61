"""Forms of the account pages."""

from django.contrib.auth.forms import UserCreationForm

from chatapp.models import User


class SignUpForm(UserCreationForm):
    class Meta:
        model = User
        fields = ("username",)
