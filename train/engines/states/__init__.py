"""Hidden states from an inference server: requests, files and their checks, a window, and what vLLM
loads for it."""
