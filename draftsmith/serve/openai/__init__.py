"""OpenAI's protocol: the fields of requests, the reading of bodies, and the shape of answers."""
