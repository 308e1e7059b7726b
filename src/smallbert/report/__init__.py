"""Reports: cards as a table in the terminal, and as one self-contained page with plots."""

from smallbert.report.page import write_report
from smallbert.report.table import format_rows, render_table

__all__ = ["format_rows", "render_table", "write_report"]
