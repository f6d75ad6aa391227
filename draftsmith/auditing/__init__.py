"""`draftsmith audit`: judges from outside whether an engine's text is the target's."""
