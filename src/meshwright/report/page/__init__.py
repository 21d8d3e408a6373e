"""The pages: a job's answers and those of its neighbours, or a run as it was, each as one HTML file that opens offline.
No formula lives in a
file: its script shows, sorts and filters numbers that were computed here."""

from meshwright.report.page.page_grid import PageAxes, PageGrid, grid_shape_for, page_axes, search_page_grid
from meshwright.report.page.plan_page import plan_page_text
from meshwright.report.page.run_page import run_page_text

__all__ = ["PageAxes", "PageGrid", "grid_shape_for", "page_axes", "plan_page_text", "run_page_text", "search_page_grid"]
