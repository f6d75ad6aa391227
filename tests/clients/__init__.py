"""Clients that others make. Each is used as its documentation says, against a served target.

`make test-clients` installs them; `tests/test_clients.py` runs them. A script reads the server's
address from BASE_URL and the model's name from MODEL, asks PROMPT, and prints the answer."""

from dataclasses import dataclass
from pathlib import Path

PLACE = Path(__file__).parent


@dataclass(frozen=True)
class Client:
    """One client: its script in this folder, and the environment that it runs in.

    Attributes:
        package: as its registry names it.
        environment: the stem of the file that pins its packages (`node`: package.json).
        exact: the client sends the prompt alone, greedy, with 16 tokens at most; its answer is then
            the server's, byte by byte. Others add their own instructions.
        kind: what the script does, in a few words.
    """

    script: str
    package: str
    environment: str
    exact: bool
    kind: str


CLIENTS = (
    Client("openai_python.py", "openai", "agents", True, "chat, completions, responses, streams"),
    Client("anthropic_python.py", "anthropic", "agents", True, "messages, a stream, counts"),
    Client("langchain.py", "langchain-openai", "agents", True, "chat, with an agent's name"),
    Client("autogen.py", "autogen-ext", "agents", False, "an assistant agent"),
    Client("semantic_kernel.py", "semantic-kernel", "agents", False, "a chat completion agent"),
    Client("openai_agents.py", "openai-agents", "agents", False, "an agent, over Responses"),
    Client("llm_command.py", "llm", "agents", True, "the command `llm`"),
    Client("litellm_sdk.py", "litellm", "proxies", True, "chat"),
    Client("litellm_proxy.py", "litellm", "proxies", True, "chat and Responses through the proxy"),
    Client("llama_index.py", "llama-index-llms-openai-like", "proxies", True, "chat and complete"),
    Client("lm_eval.py", "lm-eval", "proxies", False, "a generation task with six stop strings"),
    Client("aider.py", "aider-chat", "aider", False, "one message about a file"),
    Client("guidellm.py", "guidellm", "guidellm", False, "three requests, one after the other"),
    Client("openai_node.mjs", "openai", "node", True, "chat, responses, a stream"),
    Client("claude_code.mjs", "@anthropic-ai/claude-code", "node", False, "one question"),
    Client("ai_openai.mjs", "@ai-sdk/openai", "node", True, "`ai` over Responses"),
    Client(
        "ai_compatible.mjs", "@ai-sdk/openai-compatible", "node", True, "`ai` over Chat Completions"
    ),
)
