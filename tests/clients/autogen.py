import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

info = ModelInfo(
    vision=False,
    function_calling=False,
    json_output=False,
    family="unknown",
    structured_output=False,
)


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=os.environ["MODEL"],
        base_url=os.environ["BASE_URL"],
        api_key="none",
        model_info=info,
        max_tokens=32,
    )
    agent = AssistantAgent("helper", model_client=client)
    result = await agent.run(task=os.environ["PROMPT"])
    print(result.messages[-1].content)
    await client.close()


asyncio.run(main())
