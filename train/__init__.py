"""Configs, data, stages, runs, reports and the command line."""
