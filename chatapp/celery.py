"""The Celery application: the broker, and how a worker starts.

A worker of its own is started with ``celery -A chatapp worker --pool threads``; ``manage.py serve`` runs one in a
thread of its process (see chatapp/embedded.py).
"""

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_shutdown

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "chatapp.settings")

app = Celery("keepwarm")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["chatapp"])


@worker_init.connect
def start_engine(**_: Any) -> None:
    # Imported here: the web process imports this module and must not import torch. That takes seconds, so say first
    # that there is a worker.
    from chatapp import workers
    from chatapp.protocol import ModelStatus

    workers.publish(ModelStatus(state="starting"))
    from chatapp import engine_host

    engine_host.start()


@worker_shutdown.connect
def stop_engine(**_: Any) -> None:
    from chatapp import engine_host

    engine_host.stop()
