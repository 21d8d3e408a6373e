"""The pages: a job's answers and those of its neighbours, or a run as it was, each as one HTML file that opens offline. No formula lives in a
file: its script shows, sorts and filters numbers that were computed here."""

from meshwright.report.page.axes import Axes, axes_of, shape_for
from meshwright.report.page.file import page_text
from meshwright.report.page.grid import Grid, grid
from meshwright.report.page.run import run_page_text

__all__ = ["Axes", "Grid", "axes_of", "grid", "page_text", "run_page_text", "shape_for"]
