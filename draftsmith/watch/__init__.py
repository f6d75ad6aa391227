"""`draftsmith watch`: a local page that follows a run from the files that the run writes."""
