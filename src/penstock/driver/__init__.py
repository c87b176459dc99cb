"""The driver side: workers connect to the coordinator, authenticate, report their state and receive commands."""
