"""The report: a directory of logs as one page that needs nothing else."""

from tripwire.report.collector import build_report
from tripwire.report.comparison import compare
from tripwire.report.model import Report
from tripwire.report.page import write_report

__all__ = ["Report", "build_report", "compare", "write_report"]
