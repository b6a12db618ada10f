"""The `dpftrl` command: one file per command, no mathematics."""
