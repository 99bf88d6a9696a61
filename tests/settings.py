"""Settings of the tests that run in this process; servers that tests start have the product's own."""

import os
import tempfile

os.environ.setdefault("DATA_DIR", tempfile.mkdtemp(prefix="keepwarm-tests-"))

from chatapp.settings import *  # noqa: F403

# Hashing passwords slowly is for real ones.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
