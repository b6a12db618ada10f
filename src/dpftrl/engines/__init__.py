"""Where clients run: in this process, or elsewhere. The server is the same."""
