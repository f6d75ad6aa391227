import os

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model=os.environ["MODEL"],
    base_url=os.environ["BASE_URL"],
    api_key="none",
    temperature=0,
    max_tokens=16,
)
answer = model.invoke(os.environ["PROMPT"]).content
history = [HumanMessage("Hi"), AIMessage("Hello.", name="helper"), HumanMessage("Go on.")]
assert model.invoke(history).content
assert "".join(chunk.content for chunk in model.stream(os.environ["PROMPT"])) == answer
print(answer)
