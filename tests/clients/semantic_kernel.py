import asyncio
import os

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion


async def main() -> None:
    service = OpenAIChatCompletion(
        ai_model_id=os.environ["MODEL"],
        async_client=AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none"),
    )
    agent = ChatCompletionAgent(service=service, name="helper", instructions="Be short.")
    first = await agent.get_response(messages=os.environ["PROMPT"])
    # The second turn sends the first answer back, with the agent's name.
    second = await agent.get_response(messages="Go on.", thread=first.thread)
    print(second)


asyncio.run(main())
