import os

from agents import Agent, Runner, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

set_default_openai_client(AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none"))
set_tracing_disabled(True)
agent = Agent(name="helper", instructions="Be short.", model=os.environ["MODEL"])
print(Runner.run_sync(agent, os.environ["PROMPT"]).final_output)
