"""A task's state, as its component uses it. (Placeholder: being built.)"""

from __future__ import annotations


class TaskState:
    """Values and maps by name."""
