"""Shared package of the EAGLE-3 draft workbook: notebooks explain, these modules compute."""

RESULTS_VERSION = 2  # raise when a change here can move a figure of the rendered pages
