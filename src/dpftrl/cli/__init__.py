"""The `dpftrl` command: one file a command, no maths."""
