"""Programs for those who work on the repository, which are no tests."""
