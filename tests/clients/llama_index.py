import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["BASE_URL"],
    api_key="none",
    is_chat_model=True,
    temperature=0,
    max_tokens=16,
)
answer = model.chat([ChatMessage(role="user", content=os.environ["PROMPT"])]).message.content
assert "".join(c.delta for c in model.stream_complete(os.environ["PROMPT"])) == answer
print(answer)
