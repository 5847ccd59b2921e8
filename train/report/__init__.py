"""`report.html` of a run: `write_report`."""

from train.report.page import write_report

__all__ = ["write_report"]
