"""The service under load: its speed beside others, and whether it keeps its promises for long."""
