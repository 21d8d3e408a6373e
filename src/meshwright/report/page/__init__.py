"""Writes HTML pages that open offline: the plans for a job and for similar jobs, a training run, or the
comparison of a recording with one device.

The scripts contain no formulas. They show, sort and filter numbers that Python has computed.
"""

from meshwright.report.page.page_grid import PageAxes, PageGrid, grid_shape_for, page_axes, search_page_grid
from meshwright.report.page.plan_page import plan_page_text
from meshwright.report.page.recording_page import recording_page_text
from meshwright.report.page.run_page import run_page_text

__all__ = [
    "PageAxes",
    "PageGrid",
    "grid_shape_for",
    "page_axes",
    "plan_page_text",
    "recording_page_text",
    "run_page_text",
    "search_page_grid",
]
