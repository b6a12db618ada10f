"""The files of a run on the disk: crash-safe, and written by one server at a time."""
