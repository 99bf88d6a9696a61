#!/usr/bin/env python
"""Django's command line. ``manage.py serve`` runs the whole chat in one process."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "chatapp.settings")
    try:
        from django.core.management import execute_from_command_line
    except ImportError as missing:
        raise SystemExit(f"{missing}. Run `make setup`, then use .venv/bin/python manage.py.") from missing
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
