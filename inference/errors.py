"""Errors that callers of this package handle."""

from __future__ import annotations


class ModelUnavailable(Exception):
    """The model cannot be used. `message` says what is wrong and what to do, in words for an operator."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineStopped(Exception):
    """The engine was shut down. Nothing is wrong with the model: another engine can do the work."""


class PromptRefused(ValueError):
    """The model's chat template cannot express this conversation."""
