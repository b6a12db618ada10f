"""Clients that run in this process."""
