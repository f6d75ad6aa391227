"""The configs and prompts that come with draftsmith, as package data."""
