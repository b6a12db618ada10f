"""Privacy statements: what to publish about a plan, a guarantee or a run."""

from dpftrl.statement.statement import Statement, make_statement, save_statement

__all__ = ["Statement", "make_statement", "save_statement"]
