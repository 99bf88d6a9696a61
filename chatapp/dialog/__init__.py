"""What of a conversation the next answer attends to. Runs in workers; imports neither views nor torch."""

from chatapp.dialog.planner import ContextPlan, Decision, plan_context

__all__ = ["ContextPlan", "Decision", "plan_context"]
