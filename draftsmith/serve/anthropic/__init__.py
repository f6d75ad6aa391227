"""/v1/messages: requests and answers in the shape of Anthropic's API, which coding agents use."""
