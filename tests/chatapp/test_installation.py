"""What an installation relies on: no torch in the web process, safe settings, a database fit for several threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from django.core.management import call_command
from django.db import connection

from tests.support.server import REPOSITORY, manage


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "chatapp.settings"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HEAVY = "{'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)"


@pytest.mark.parametrize("module", ["chatapp.asgi", "chatapp.tasks", "chatapp.dialog"])
def test_the_web_process_does_not_import_torch(module: str) -> None:
    assert run_python(f"import sys, django; django.setup(); import {module}; print({HEAVY})") == "set()"


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("kvstore", "{'django', 'celery', 'chatapp', 'inference', 'transformers'}"),
        ("inference", "{'django', 'chatapp'}"),
    ],
)
def test_packages_import_downwards_only(package: str, others: str) -> None:
    code = f"""
import importlib, pkgutil, sys, {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print({others} & set(sys.modules))
"""
    assert run_python(code) == "set()"


def test_a_public_site_passes_the_deployment_check() -> None:
    environment = os.environ | {"PUBLIC_URL": "https://chat.example.org", "SECRET_KEY": "x1y2z3" * 20}
    output = manage("check", "--deploy", "--fail-level", "INFO", environment=environment)
    assert "no issues" in output


def test_the_secret_key_is_made_once_and_for_its_user_only(tmp_path: os.PathLike[str]) -> None:
    code = "from django.conf import settings; print(settings.SECRET_KEY)"
    first = run_python(code, DATA_DIR=str(tmp_path), SECRET_KEY="")
    assert len(first) > 50
    assert run_python(code, DATA_DIR=str(tmp_path), SECRET_KEY="") == first
    assert os.stat(os.path.join(tmp_path, "secret_key")).st_mode & 0o777 == 0o600


@pytest.mark.django_db
def test_models_and_migrations_agree() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


@pytest.mark.django_db
def test_sqlite_lets_readers_and_a_writer_work_at_once() -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA synchronous")
        assert cursor.fetchone()[0] == 1
    code = """
import django; django.setup()
from django.db import connection
cursor = connection.cursor(); cursor.execute("PRAGMA journal_mode"); print(cursor.fetchone()[0])
"""
    assert run_python(code, DATABASE_URL="") == "wal"


def test_every_setting_is_documented_with_its_default() -> None:
    page = (REPOSITORY / "docs" / "settings.md").read_text()
    read = re.findall(r"env\.\w+\(\s*\"([A-Z_]+)\"", (REPOSITORY / "chatapp" / "settings.py").read_text())
    documented = re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(read)
