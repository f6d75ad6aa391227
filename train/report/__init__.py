"""The report of a run: report.json for programs, report.html for people, a table for the terminal.

The report reads everything from the run's directory (see `train.run.run`), so it can be made again
at any time with the same result. `train.measure.figures` explains each figure. A missing figure is
None in report.json and '–' in the page and the table.
"""
