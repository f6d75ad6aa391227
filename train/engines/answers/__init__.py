"""Answers to prompts from an inference server: requests, replies, retries, journal, launch."""
