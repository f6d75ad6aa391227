"""OpenAI's contract: the fields of requests, the reading of bodies, and the shape of answers."""
