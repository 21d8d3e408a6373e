"""The page: a job's answers, and those of its neighbours, as one HTML file that opens offline. No formula lives in the file: its script shows, sorts
and filters numbers that were computed here."""

from meshwright.report.page.axes import Axes, axes_of, shape_for
from meshwright.report.page.file import page_text
from meshwright.report.page.grid import Grid, grid

__all__ = ["Axes", "Grid", "axes_of", "grid", "page_text", "shape_for"]
