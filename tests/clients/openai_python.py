import os

from openai import OpenAI

client = OpenAI(base_url=os.environ["BASE_URL"], api_key="none")
asked = {"model": os.environ["MODEL"], "temperature": 0}
messages = [{"role": "user", "content": os.environ["PROMPT"]}]

chat = client.chat.completions.create(messages=messages, max_completion_tokens=16, **asked)
answer = chat.choices[0].message.content
stream = client.chat.completions.create(
    messages=messages,
    max_completion_tokens=16,
    stream=True,
    stream_options={"include_usage": True},
    **asked,
)
assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == answer
response = client.responses.create(input=os.environ["PROMPT"], max_output_tokens=16, **asked)
assert response.output_text == answer
events = client.responses.create(
    input=os.environ["PROMPT"], max_output_tokens=16, stream=True, **asked
)
deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
assert "".join(deltas) == answer
completion = client.completions.create(prompt=os.environ["PROMPT"], **asked)
assert completion.usage.completion_tokens <= 16
print(answer)
