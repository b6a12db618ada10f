"""Helpers that several packages of dpftrl share. They are not part of the public API."""
