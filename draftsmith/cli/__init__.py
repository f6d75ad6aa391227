"""The commands of `draftsmith`, a file for each group. Importing them loads no torch."""
