"""Policies: pure functions of what they are told, with no IO, clock, thread or Spark. The slots, the coordinator
and the simulator drive the very same code."""
