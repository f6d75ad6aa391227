"""Learning beside an inference engine: from its recorded answers to a better drafter in it."""
