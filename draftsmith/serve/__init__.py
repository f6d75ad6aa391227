"""The service: one thread that decodes, and HTTP around it in the shape of OpenAI's API."""
