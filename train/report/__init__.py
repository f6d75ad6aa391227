"""The report of a run: report.json for programs, report.html for people, a table for the terminal.

Everything is read from the run's directory (see `train.run`), so a report can be made again at any
time and comes out the same. What each figure means is written in `decode.measure.evaluation`; a
figure that does not exist is None in report.json and '–' where people read it.
"""
