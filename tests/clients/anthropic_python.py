import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ["BASE_URL"].removesuffix("/v1"), api_key="none")
asked = {
    "model": os.environ["MODEL"],
    "max_tokens": 16,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": os.environ["PROMPT"]}],
}

message = client.messages.create(**asked)
answer = message.content[0].text
with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == answer
    assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
counted = client.messages.count_tokens(model=asked["model"], messages=asked["messages"])
usage = message.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
print(answer)
