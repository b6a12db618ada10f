"""Empirical audits: what an attacker achieves against the real code, beside what is claimed."""
